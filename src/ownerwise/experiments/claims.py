"""The papers' claims beside what was found: one table that can be taken in at a glance.

`claims.toml` has the claims as data. A claim names a setting, a method and a metric; with `minus`,
the metric is the difference to another method over the seeds that both have.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.evaluation import Amount
from ownerwise.experiments import methods, provenance, settings, summary
from ownerwise.experiments.markdown import amount, table
from ownerwise.experiments.methods import Method
from ownerwise.experiments.summary import METRICS, Result, Study

SEEDS = 5
"""Seeds in the command of a claim that was not run."""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is measured here.

    Attributes:
        paper: its name.
        where: the table, figure or section.
        claim: what is said, in our words.
        theirs: its number in the metric's unit, or words where it names none.
        deviation: over their trials, where it names one.
        setting: the setting here.
        method: the method here, with its argument.
        metric: one of `METRICS`, `MEASURES`, `COMPARISONS`, or "group:NAME" for a group's recall.
        minus: the method that is compared with.
        changes: "section.key=value" each, as runs were made with.
        note: the likely reason of a difference.
    """

    paper: str
    where: str
    claim: str
    theirs: float | str
    setting: str
    method: str
    metric: str
    deviation: float | None = None
    minus: str | None = None
    changes: tuple[str, ...] = ()
    note: str = ""

    @property
    def methods(self) -> list[Method]:
        """The methods that must have run: that which is subtracted first."""
        return methods.parse(self.method if self.minus is None else f"{self.minus},{self.method}")


@dataclass(frozen=True)
class Finding:
    """A claim with what was found, as tables show it.

    Attributes:
        claim: of the paper.
        theirs: its number in words.
        ours: mean and deviation in words; "not run" without results.
        distance: ours minus theirs, where both are numbers.
        seeds: number of seeds.
        study: name of the study that it comes from; None if not run.
        heading: of that study.
        command: that makes the runs.
    """

    claim: Claim
    theirs: str
    ours: str
    distance: float | None
    seeds: int
    study: str | None
    heading: str
    command: str


def read() -> list[Claim]:
    """Return all claims."""
    text = (files("ownerwise.experiments") / "claims.toml").read_text(encoding="utf-8")
    return make_claims(tomllib.loads(text)["claim"])


def make_claims(entries: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return claims from the tables of a TOML file, or say everything that is wrong with them."""
    problems = [
        f"claim {number}: {problem}"
        for number, entry in enumerate(entries, 1)
        for problem in _problems(entry)
    ]
    if problems:
        raise OwnerwiseError(problems)
    return [Claim(**{**entry, "changes": tuple(entry.get("changes", ()))}) for entry in entries]


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    known = Claim.__dataclass_fields__
    unknown = [key for key in entry if key not in known]
    if unknown:
        yield f"{name_some(unknown)}: expected {', '.join(known)}"
    needed = ("paper", "where", "claim", "theirs", "setting", "method", "metric")
    missing = [key for key in needed if key not in entry]
    if missing:
        yield f"{name_some(missing)} is missing"
        return
    try:
        settings.setting(entry["setting"]).configure(0, changes=entry.get("changes", ()))
        methods.parse(",".join([entry["method"], entry.get("minus", "")]))
    except OwnerwiseError as error:
        yield from error.problems
    metric = entry["metric"]
    if metric not in (*METRICS, *MEASURES, *COMPARISONS) and not metric.startswith("group:"):
        expected = ", ".join((*METRICS, *MEASURES, *COMPARISONS, "group:NAME"))
        yield f"metric {metric!r}: expected one of {expected}"
    if metric in COMPARISONS and "minus" not in entry:
        yield f"metric {metric} compares two methods: minus is missing"
    if metric in MEASURES and "minus" in entry:
        yield f"metric {metric} is measured of one method: remove minus"


def find(claims: Sequence[Claim], studies: Sequence[Study]) -> list[Finding]:
    """Return every claim with what was found: one finding for each profile that was run."""
    return [finding for claim in claims for finding in _findings(claim, studies)]


def _findings(claim: Claim, studies: Sequence[Study]) -> list[Finding]:
    asked = claim.methods
    found = []
    for study in studies:
        run = study.first
        same = run["setting"] == claim.setting and sorted(run["changes"]) == sorted(claim.changes)
        if same and all(method.slug in study.methods for method in asked):
            finding = _finding(claim, study)
            if finding is not None:
                found.append(finding)
    if found:
        return found
    specs = [method.spec for method in asked]
    command = provenance.command("run", claim.setting, specs, range(SEEDS), changes=claim.changes)
    return [Finding(claim, _theirs(claim), "not run", None, 0, None, claim.setting, command)]


def _finding(claim: Claim, study: Study) -> Finding | None:
    """Return what a study says of a claim; None if its methods have no seed in common."""
    *other, runs = (study.methods[method.slug] for method in claim.methods)
    if other:
        shared = {run["seed"] for run in runs} & {run["seed"] for run in other[0]}
        runs = [run for run in runs if run["seed"] in shared]
        other = [[run for run in other[0] if run["seed"] in shared]]
    if not runs:
        return None
    distance = None
    if claim.metric in COMPARISONS:
        ours = COMPARISONS[claim.metric](other[0], runs)
    else:
        value = _measured(claim, runs, other)
        factor, unit = _unit(claim)
        ours = f"{amount(value, factor)} {unit}"
        if not isinstance(claim.theirs, str):
            distance = factor * value.mean - claim.theirs
    command = provenance.command(
        "run",
        claim.setting,
        [method.spec for method in claim.methods],
        [run["seed"] for run in runs],
        study.first["profile"],
        study.first["changes"],
    )
    return Finding(
        claim, _theirs(claim), ours, distance, len(runs), study.name, study.heading, command
    )


def _measured(claim: Claim, runs: Sequence[Result], other: Sequence[Sequence[Result]]) -> Amount:
    if claim.metric in MEASURES:
        return MEASURES[claim.metric](runs)
    values = {run["seed"]: _value(claim.metric, run) for run in runs}
    for run in other[0] if other else ():
        values[run["seed"]] -= _value(claim.metric, run)
    return Amount.of(list(values.values()))


def _value(metric: str, run: Result) -> float:
    if metric.startswith("group:"):
        return run["final"]["groups"][metric.removeprefix("group:")]["recall"]
    return summary.measure(run)[metric]


def _epoch_seconds(runs: Sequence[Result]) -> Amount:
    times = [summary.epoch_seconds([run]) for run in runs]
    return Amount.of([seconds for seconds in times if seconds is not None])


def _drop_share(runs: Sequence[Result]) -> Amount:
    """Return the share of the steps in which the strictest group is above its first loss."""
    strictest = min(runs[0]["budgets"], key=runs[0]["budgets"].__getitem__)
    return Amount.of(
        [summary.drops([run])[strictest].steps / run["history"][-1]["step"] for run in runs]
    )


def _gap(runs: Sequence[Result]) -> Amount:
    """Return the best minus the worst of the groups' mean recalls."""
    recalls = [recall.mean for recall in summary.group_recalls(runs).values()]
    return Amount(max(recalls) - min(recalls), None, len(runs))


def _correlation(before: Sequence[Result], runs: Sequence[Result]) -> str:
    found = summary.gain(before, runs)
    if found is None or found.correlation is None:
        return "no correlation can be had"
    return f"r = {found.correlation:.2f}, p = {found.p:.2g}"


def _reach(before: Sequence[Result], runs: Sequence[Result]) -> str:
    """Return after which share of the steps the strict owners have what the other ends with."""
    wanted = summary.over_seeds(before, "validation")["strict"].mean
    steps = [line["step"] for line in runs[0]["history"]]
    recalls = np.mean(
        [
            [summary.measure_line(line, run["budgets"])["strict"] for line in run["history"]]
            for run in runs
        ],
        axis=0,
    )
    reached = np.flatnonzero(recalls >= wanted)
    return f"{100 * steps[reached[0]] / steps[-1]:.0f} % of the steps" if len(reached) else "never"


def _overhead(before: Sequence[Result], runs: Sequence[Result]) -> str:
    """Return how much longer an epoch takes, by the means over seeds."""
    return f"{100 * (_epoch_seconds(runs).mean / _epoch_seconds(before).mean - 1):+.1f} %"


MEASURES: Mapping[str, Callable[[Sequence[Result]], Amount]] = {
    "epoch_seconds": _epoch_seconds,
    "drop_share": _drop_share,
    "gap": _gap,
}
"""What a claim may measure of a method beside `METRICS`: seconds of an epoch, the share of steps in
which the strictest group fares worse than before training, and the best minus the worst recall."""

COMPARISONS: Mapping[str, Callable[[Sequence[Result], Sequence[Result]], str]] = {
    "correlation": _correlation,
    "reach": _reach,
    "overhead": _overhead,
}
"""What a claim may say of two methods that is no difference, in words."""


def _unit(claim: Claim) -> tuple[float, str]:
    """Return by what numbers are multiplied, and their unit after that."""
    if claim.metric == "epoch_seconds":
        return 1.0, "s"
    return 100.0, "%" if claim.minus is None else "points"


def _theirs(claim: Claim) -> str:
    if isinstance(claim.theirs, str):
        return claim.theirs
    return f"{amount(Amount(claim.theirs, claim.deviation, 1))} {_unit(claim)[1]}"


def page_part(findings: Sequence[Finding]) -> str:
    """Return the table of claims, those that were not run apart, and what must be said of them."""
    run = [finding for finding in findings if finding.study is not None]
    missing = [finding for finding in findings if finding.study is None]
    parts = [
        "Mean and standard deviation over seeds. Differences are in points, over the seeds that "
        "both methods have. The distance is ours minus theirs. Commands follow "
        f"`{provenance.PROGRAM}`.",
    ]
    if run:
        header = ["paper", "claim", "theirs", "ours", "distance", "command"]
        parts.append(table(header, list(map(_row, run)), texts=len(header)))
    claims = [finding.claim for finding in run if finding.claim.note]
    if claims:
        notes = (f"- {_place(claim)}, {claim.setting}: {claim.note}" for claim in claims)
        parts.append("\n".join(dict.fromkeys(notes)))
    if missing:
        header = ["not run", "claim", "theirs", "command"]
        parts.append(table(header, list(map(_missing_row, missing)), texts=len(header)))
    return "\n\n".join(parts)


def _row(finding: Finding) -> list[str]:
    seeds = f"{finding.seeds} seed" + ("s" if finding.seeds > 1 else "")
    paper, claim, theirs, command = _missing_row(finding)
    return [
        paper,
        claim,
        theirs,
        f"**{finding.ours}**, {seeds}, [{finding.heading}]({finding.study}.md)",
        "" if finding.distance is None else f"{finding.distance:+.2f}",
        command,
    ]


def _missing_row(finding: Finding) -> list[str]:
    command = finding.command.removeprefix(f"{provenance.PROGRAM} ")
    return [_place(finding.claim), finding.claim.claim, finding.theirs, f"`{command}`"]


def _place(claim: Claim) -> str:
    return f"{claim.paper}, {claim.where}"
