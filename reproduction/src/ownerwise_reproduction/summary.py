"""Results over seeds: means, standard deviations, gains by owner, and initial drops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import pearsonr

from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation import (
    FEW_GROUPS,
)
from ownerwise.wording import Amount
from ownerwise_reproduction.initial_drop import minority_initial_drop

Result = Mapping[str, Any]
BASELINE = "idp"

METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "worst_group": "worst group",
    "worst_half": "worse half of groups",
    "strictest": "strictest owner",
    "strict": "strict owners",
    "spread": "spread",
}
"""The metrics of a run, and their names in tables. `strictest` is the recall of the group with the
lowest budget, and `strict` is the mean recall over the groups whose budget is below the mean; both
are missing if all groups have the same budget. `worst_half`, the mean recall over the worse half of
the groups, is included if there are many groups."""

MANY_GROUPS = 20
"""With at least this many groups, chance mostly determines which group is the worst."""

FEWEST_SEEDS = 3
"""With fewer seeds than this, the verdict on a difference or correlation is "undecided"."""


@dataclass(frozen=True)
class Study:
    """Comparable runs, which share the same setting, profile and changes.

    Attributes:
        name: SETTING/VARIANT, which is also the folder for the study's pages.
        heading: the study's heading on pages.
        methods: {method: its runs in order of seed}.
    """

    name: str
    heading: str
    methods: dict[str, list[Result]] = field(default_factory=dict)

    @property
    def first(self) -> Result:
        """One of the runs, used to read properties that all runs share."""
        return next(iter(self.methods.values()))[0]

    @property
    def budgets(self) -> dict[str, float]:
        """Declared epsilon of every group, in increasing order."""
        found = self.first["budgets"]
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def only(self, methods: Sequence[str]) -> Study:
        """Return a copy of the study with only the given methods."""
        return replace(self, methods={name: self.methods[name] for name in methods})

    def label(self, method: str) -> str:
        """Return a method's name for tables, with its caveats."""
        first = self.methods[method][0]
        notes = first["not_private"][1:]
        return f"{first['label']} ({'; '.join(notes)})" if notes else first["label"]


@dataclass(frozen=True)
class Gain:
    """A method's recall minus the baseline's, by group, and its correlation with the budget.

    Attributes:
        by_group: mean gain of each group over the seeds that both methods share.
        correlation: Pearson's r between gain and budget over groups; None for fewer than
            `FEW_GROUPS` groups, or if all budgets are equal.
        interval: 95% confidence interval of the correlation (Fisher).
        p: p-value for the null hypothesis of no correlation.
        seeds: number of seeds.
    """

    by_group: dict[str, float]
    correlation: float | None
    interval: tuple[float, float] | None
    p: float | None
    seeds: int


@dataclass(frozen=True)
class Drop:
    """The minority initial drop of a group, averaged over the seeds that show one.

    Attributes:
        first, last: first and last step of the drop, as defined in `minority_initial_drop`.
        depth: largest increase of the group's loss over its initial value.
        seeds: number of seeds with such a drop.
    """

    first: float
    last: float
    depth: float
    seeds: int


def studies(results: Sequence[Result]) -> list[Study]:
    """Return the results grouped into studies, or raise an error that lists duplicate runs."""
    found: dict[str, Study] = {}
    problems = []
    for result in results:
        name, heading = _name(result)
        study = found.setdefault(name, Study(name, heading))
        if study.heading != heading:
            problems.append(f"{study.heading} and {heading} would share the folder {name}")
        runs = study.methods.setdefault(result["method"], [])
        if any(run["seed"] == result["seed"] for run in runs):
            problems.append(
                f"{heading}: {result['method']} has two results for seed {result['seed']}, made "
                "from different values or data: delete the outdated one"
            )
        runs.append(result)
    if problems:
        raise OwnerwiseError(problems)
    for study in found.values():
        ranked = sorted(study.methods.items(), key=lambda item: _rank(item[0]))
        study.methods.clear()
        study.methods.update(ranked)
    return list(found.values())


def measure(result: Result, part: str = "final") -> dict[str, float]:
    """Return the metrics listed in `METRICS` from a run's last evaluation."""
    return measure_line(result[part], result["budgets"])


def measure_line(line: Result, declared: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one evaluation, given the groups' declared budgets."""
    recalls = {group: found["recall"] for group, found in line["groups"].items()}
    budgets = {group: declared[group] for group in recalls}
    measured = {
        "accuracy": line["accuracy"],
        "balanced_accuracy": line["balanced_accuracy"],
        "worst_group": line["worst_group"]["recall"],
        "spread": line["spread"],
    }
    if len(recalls) >= MANY_GROUPS:
        measured["worst_half"] = worst_half(line)
    strict = strict_groups(budgets)
    if strict:
        lowest = min(budgets.values())
        strictest = [recalls[group] for group in strict if budgets[group] == lowest]
        measured["strictest"] = float(np.mean(strictest))
        measured["strict"] = float(np.mean([recalls[group] for group in strict]))
    return measured


def worst_half(line: Result) -> float:
    """Return the mean recall over the worse half of the groups in an evaluation."""
    recalls = sorted(group["recall"] for group in line["groups"].values())
    return float(np.mean(recalls[: -(-len(recalls) // 2)]))


def strict_groups(budgets: Mapping[str, float]) -> list[str]:
    """Return the groups whose budget is below the mean; none if all budgets are equal."""
    mean = np.mean(list(budgets.values()))
    return [group for group, epsilon in budgets.items() if epsilon < mean - 1e-12]


def over_seeds(runs: Sequence[Result], part: str = "final") -> dict[str, Amount]:
    """Return the mean and standard deviation of every metric over the runs of a method."""
    measured = [measure(run, part) for run in runs]
    return {
        name: Amount.of([one[name] for one in measured]) for name in METRICS if name in measured[0]
    }


def group_recalls(runs: Sequence[Result]) -> dict[str, Amount]:
    """Return the mean and standard deviation of every group's recall over the runs of a method."""
    groups = runs[0]["final"]["groups"]
    return {group: Amount.of([_recall(run, group) for run in runs]) for group in groups}


def pairs_by_seed(
    baseline: Sequence[Result], runs: Sequence[Result]
) -> list[tuple[Result, Result]]:
    """Return the runs of two methods that share a seed, as (baseline, run) pairs."""
    before = {run["seed"]: run for run in baseline}
    return [(before[run["seed"]], run) for run in runs if run["seed"] in before]


def gain(baseline: Sequence[Result], runs: Sequence[Result]) -> Gain | None:
    """Return each group's gain over the seeds that both methods share; None if it is undefined.

    The gain is undefined without shared seeds, or if the two methods' group budgets differ.
    """
    pairs = pairs_by_seed(baseline, runs)
    if not pairs or pairs[0][0]["budgets"] != pairs[0][1]["budgets"]:
        return None
    by_group = {
        group: float(np.mean([_recall(new, group) - _recall(old, group) for old, new in pairs]))
        for group in pairs[0][0]["final"]["groups"]
    }
    budgets = [pairs[0][0]["budgets"][group] for group in by_group]
    correlation, interval, p = _correlate(budgets, list(by_group.values()))
    return Gain(by_group, correlation, interval, p, len(pairs))


def _correlate(
    budgets: Sequence[float], gains: Sequence[float]
) -> tuple[float | None, tuple[float, float] | None, float | None]:
    if len(budgets) < FEW_GROUPS or np.ptp(budgets) == 0 or np.ptp(gains) == 0:
        return None, None, None
    found: Any = pearsonr(budgets, gains)
    low, high = found.confidence_interval(0.95)
    return float(found.statistic), (float(low), float(high)), float(found.pvalue)


def drops(runs: Sequence[Result]) -> dict[str, Drop]:
    """Return the minority initial drop of every group that has one in at least one run."""
    groups = list(runs[0]["history"][0]["groups"])
    by_group: dict[str, list[tuple[int, int, float]]] = {group: [] for group in groups}
    for run in runs:
        history = run["history"]
        losses = [[_number(line["groups"][g]["loss"]) for g in groups] for line in history]
        overall = [_number(line["loss"]) for line in history]
        found = minority_initial_drop(np.array(losses), np.array(overall))
        for group, drop in zip(groups, found, strict=True):
            if drop is not None:
                first, last = (history[at]["step"] for at in (drop.first, drop.last))
                by_group[group].append((first, last, drop.depth))
    means = {group: np.mean(found, axis=0) for group, found in by_group.items() if found}
    return {
        group: Drop(float(first), float(last), float(depth), len(by_group[group]))
        for group, (first, last, depth) in means.items()
    }


def epoch_seconds(runs: Sequence[Result]) -> float | None:
    """Return the training time for one pass over the records; None for plain SGD."""
    times = []
    for run in runs:
        if not run["plans"]:
            return None
        seen = sum(plan["steps"] * plan["expected_batch_size"] for plan in run["plans"])
        records = sum(plan["records"] for plan in run["plans"])
        times.append(run["train_seconds"] * records / seen)
    return float(np.mean(times))


def gradients(runs: Sequence[Result]) -> tuple[float, float] | None:
    """Return the mean numbers of gradients evaluated and summed per run; None if unknown.

    The two numbers differ if records are accepted based on their gradient norms.
    """
    found = [run["gradients"] for run in runs if "gradients" in run]
    if not found:
        return None
    evaluated, summed = (np.mean([one[key] for one in found]) for key in ("evaluated", "summed"))
    return float(evaluated), float(summed)


def spread_out(items: list[str], most: int) -> list[str]:
    """Return all items or, if there are many, an evenly spaced selection from first to last."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _recall(run: Result, group: str) -> float:
    return run["final"]["groups"][group]["recall"]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _name(result: Result) -> tuple[str, str]:
    """Return the name and the heading of the study that a result belongs to."""
    described = result["setting"], result["profile"], result["changes"]
    return f"{result['setting']}/{variant(*described[1:])}", heading(*described)


def variant(profile: str, changes: Sequence[str]) -> str:
    """Return the folder name for a profile with changes, such as "paper" or "short-lr-2.0".

    For each change "section.key=value", the name contains the key and the value.
    """
    words = [] if profile == "paper" and changes else [profile]
    for change in sorted(changes):
        path, _, value = change.partition("=")
        key = path.strip().rpartition(".")[2].replace("_", "-")
        words += [key, "-".join(re.findall(r"[\w.]+", value))]
    return "-".join(words)


def heading(setting: str, profile: str, changes: Sequence[str]) -> str:
    """Return the name that pages use for a study."""
    parts = _parts(profile, changes)
    return setting + (f" ({', '.join(parts)})" if parts else "")


def _parts(profile: str, changes: Sequence[str]) -> list[str]:
    return [*([] if profile == "paper" else [f"{profile} profile"]), *sorted(changes)]


def _rank(method: str) -> tuple[int, str]:
    order = ("uniform", "idp", "idp-calibrated", "ino", "ino-calibrated", "ino-budget")
    return (order.index(method) if method in order else len(order), method)
