"""The runs in a report, grouped by method and seed, with the baseline and final metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.report.facts import Facts
from ownerwise.report.groups import ValidationGroup, groups_of, nouns_of
from ownerwise.runs import Run
from ownerwise.wording import Amount


@dataclass(frozen=True)
class Metric:
    """A metric: its name, and whether higher values are better."""

    key: str
    title: str
    higher_is_better: bool = True


METRICS = (
    Metric("accuracy", "Overall accuracy"),
    Metric("owner_accuracy", "Accuracy per owner"),
    Metric("balanced_accuracy", "Balanced accuracy"),
    Metric("worst", "Worst group"),
    Metric("strictest", "Strictest budget"),
    Metric("strict_half", "Stricter half"),
    Metric("spread", "Spread", higher_is_better=False),
)


@dataclass(frozen=True)
class MethodRuns:
    """The runs of one method, which share a label. `number` determines colour and dash pattern."""

    label: str
    number: int
    runs: tuple[Run, ...]

    @property
    def weights(self) -> dict[str, Any] | None:
        """Settings for the importance weights; None if the method does not use any."""
        return self.runs[0].config.get("weights")

    @property
    def extras(self) -> frozenset[str]:
        """The names of what the method adds to plain training."""
        return extras_of(self.runs[0])


@dataclass(frozen=True)
class Comparison:
    """Everything that the sections of a report need to know about the runs.

    Attributes:
        methods: the methods; if there are several, the baseline comes first.
        source: "test" if all runs have test metrics, else "validation" if all have those, else
            None.
        groups: validation groups that all runs share, strictest budget first.
    """

    methods: tuple[MethodRuns, ...]
    source: str | None
    groups: tuple[ValidationGroup, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Comparison:
        """Group the runs into methods by their labels."""
        runs = list(runs)
        problems = Problems(
            f"run {number} is a {type(run).__name__}; expected a Run from Trainer.fit or Run.load"
            for number, run in enumerate(runs, 1)
            if not isinstance(run, Run)
        )
        if not runs:
            problems.add("no runs were passed; expected at least one Run")
        problems.raise_()
        if len({run.regression is None for run in runs}) > 1:
            raise OwnerwiseError(
                "some of the runs predict numbers and others classes: write a report on each kind"
            )
        by_label: dict[str, list[Run]] = {}
        for run in runs:
            by_label.setdefault(run.label, []).append(run)
        baseline = _baseline(by_label)
        labels = [baseline, *(label for label in by_label if label != baseline)]
        first_number = 0 if len(labels) > 1 else 1  # number 0 is dashed: it marks a baseline
        methods = tuple(
            MethodRuns(label, number, tuple(by_label[label]))
            for number, label in enumerate(labels, first_number)
        )
        source = next(
            (kind for kind in ("test", "validation") if all(last(run, kind) for run in runs)), None
        )
        return cls(methods, source, groups_of(runs, source))

    @property
    def runs(self) -> list[Run]:
        """All runs, grouped by method."""
        return [run for method in self.methods for run in method.runs]

    @property
    def baseline(self) -> MethodRuns:
        """The method with which the others are compared."""
        return self.methods[0]

    @property
    def others(self) -> tuple[MethodRuns, ...]:
        """The methods that are compared with the baseline."""
        return self.methods[1:]

    @property
    def regression(self) -> bool:
        """Whether the runs predict numbers, so that there are errors instead of recalls."""
        return all(run.regression is not None for run in self.runs)

    @property
    def group_noun(self) -> str:
        """The word for a group: "Owner", "Class" or "Group"."""
        return nouns_of(self.runs)[0]

    @property
    def data_split(self) -> str:
        """The data split on which the final metrics were computed: "test" or "validation"."""
        return self.source or "validation"

    @cached_property
    def facts(self) -> Facts:
        """What the report and the card state about the runs."""
        return Facts.of(self.runs)

    def amounts(self, method: MethodRuns, metric: Metric) -> Amount | None:
        """Return a method's final metric over its seeds; None unless every run has it."""
        values = [self.value(run, metric) for run in method.runs]
        known = [value for value in values if value is not None]
        return Amount.of(known) if known and len(known) == len(values) else None

    def group_recall(self, method: MethodRuns, group: ValidationGroup) -> Amount:
        """Return a group's final recall over the method's seeds."""
        return Amount.of([group.of(self.final(run), "recall") for run in method.runs])

    def value(self, run: Run, metric: Metric) -> float | None:
        """Return the final metric of one run; None if it was not measured."""
        if self.source is None or self.regression:  # see `report.regression`
            return None
        evaluation = self.final(run)
        if metric.key == "worst":
            value = (evaluation.get("worst_group") or {}).get("recall")
        elif metric.key == "strictest":
            value = _strict_recall(run, evaluation, 0)
        elif metric.key == "strict_half":
            value = _strict_recall(run, evaluation, 0.5)
        else:
            value = evaluation.get(metric.key)
        return None if value is None or not math.isfinite(value) else float(value)

    def final(self, run: Run) -> dict[str, Any]:
        """Return the last evaluation of a run, on the records of `source`."""
        assert self.source is not None
        evaluation = last(run, self.source)
        assert evaluation is not None
        return evaluation


def last(run: Run, kind: str) -> dict[str, Any] | None:
    """Return the last evaluation of a kind ("validation" or "test") in a run's history."""
    return next((line[kind] for line in reversed(run.history) if line.get(kind)), None)


def _strict_recall(run: Run, evaluation: dict[str, Any], share: float) -> float | None:
    """Return the mean recall of the groups with the smallest budgets.

    Args:
        run: the run, which knows the groups' budgets.
        evaluation: the groups' recalls.
        share: the fraction of groups to take; groups with the same budget as one of them count too.
    """
    recalls = {
        name: group["recall"]
        for name, group in (evaluation.get("groups") or {}).items()
        if name in run.group_budgets and "recall" in group
    }
    if not recalls:
        return None
    budgets = sorted(run.group_budgets[name] for name in recalls)
    if share and budgets[0] == budgets[-1]:
        return None
    largest = budgets[max(math.floor(share * len(budgets)) - 1, 0)]
    return float(np.mean([recalls[name] for name in recalls if run.group_budgets[name] <= largest]))


def _baseline(by_label: dict[str, list[Run]]) -> str:
    """Return the label of the baseline: the plain method that the others build on.

    The choice depends on the settings, not on the labels. A plain run has no extras
    (see `extras_of`). If other runs have any of these, the baseline is the plain run with the same
    kind of plan, or else any plain run with individual budgets. If all runs are plain, it is the
    one with uniform budgets.
    """
    first = {label: runs[0] for label, runs in by_label.items()}
    plain = [label for label, run in first.items() if not extras_of(run)]
    kinds = {run.plan.method for run in first.values() if extras_of(run)}
    if not kinds:
        plain = [label for label in plain if first[label].plan.method == "uniform"]
    if not plain:
        return next(iter(by_label))

    def rank(label: str) -> tuple[bool, bool, bool]:
        method = first[label].plan.method
        standard = (first[label].config.get("clipping") or {}).get("kind") in (None, "Standard")
        return method not in kinds, method == "uniform", not standard

    return min(plain, key=rank)


def extras_of(run: Run) -> frozenset[str]:
    """Return the names of what a run adds to plain training."""
    given = {
        "weights": run.config.get("weights"),
        "constraints": run.config.get("constraints"),
        "an adaptive clip norm": run.plan.adaptive_clip_norm,
        "paid statistics": run.plan.opening_std,
        "a calibration": run.plan.closing_std,
        "a shift from counts": run.config.get("repair"),
    }
    return frozenset(name for name, value in given.items() if value)


@dataclass(frozen=True)
class Difference:
    """The difference between two methods in one metric.

    `interval` is the 95% confidence interval. With runs on several splits of the data, on which
    both methods were trained, it is the interval of the paired differences over splits (Student's
    t). Otherwise it is two standard errors over seeds on either side, or None if either method has
    a single run.
    """

    metric: Metric
    by: float
    interval: tuple[float, float] | None

    @classmethod
    def between(cls, metric: Metric, mine: Amount, theirs: Amount) -> Difference:
        """Return the difference between two means over seeds, `mine` minus `theirs`."""
        by = mine.mean - theirs.mean
        if mine.deviation is None or theirs.deviation is None:
            return cls(metric, by, None)
        error = math.sqrt(mine.deviation**2 / mine.count + theirs.deviation**2 / theirs.count)
        return cls(metric, by, (by - 2 * error, by + 2 * error))

    @classmethod
    def paired(cls, metric: Metric, mine: Sequence[float], theirs: Sequence[float]) -> Difference:
        """Return the mean difference over splits, given one value per split and method."""
        change = Amount.of(np.subtract(mine, theirs).tolist())
        assert change.deviation is not None
        quantile = float(stats.t.ppf(0.975, change.count - 1))
        error = quantile * change.deviation / math.sqrt(change.count)
        return cls(metric, change.mean, (change.mean - error, change.mean + error))

    @property
    def clear(self) -> bool | None:
        """Whether the interval excludes 0; None if there is no interval."""
        return None if self.interval is None else self.interval[0] > 0 or self.interval[1] < 0

    @property
    def better(self) -> bool:
        """Whether the difference is an improvement."""
        return (self.by > 0) == self.metric.higher_is_better and self.by != 0

    @property
    def outcome(self) -> str:
        """Either "gained", "lost", or "even" if the difference may be due to chance."""
        if self.clear is False or not round(1000 * self.by):  # 0.0 points, as it is shown
            return "even"
        return "gained" if self.better else "lost"


def differences(comparison: Comparison, method: MethodRuns, other: MethodRuns) -> list[Difference]:
    """Return the difference, `method` minus `other`, for every metric that both have."""
    found = (difference(comparison, method, other, metric) for metric in METRICS)
    return [each for each in found if each is not None]


def difference(
    comparison: Comparison, method: MethodRuns, other: MethodRuns, metric: Metric
) -> Difference | None:
    """Return the difference, `method` minus `other`, in one metric; None unless both have it."""
    mine, theirs = comparison.amounts(method, metric), comparison.amounts(other, metric)
    if mine is None or theirs is None:
        return None
    if splits := shared_splits(method, other):
        means = [_split_means(comparison, m, metric, splits) for m in (method, other)]
        return Difference.paired(metric, *means)
    return Difference.between(metric, mine, theirs)


def _split_means(
    comparison: Comparison, method: MethodRuns, metric: Metric, splits: Sequence[str]
) -> list[float]:
    """Return the mean over seeds for each split."""
    values: dict[str | None, list[float]] = {split: [] for split in splits}
    for run in method.runs:
        value = comparison.value(run, metric)
        assert value is not None  # `amounts` found one for every run
        values[run.split].append(value)
    return [float(np.mean(of_split)) for of_split in values.values()]


def shared_splits(*methods: MethodRuns) -> list[str]:
    """Return the splits of the data on which every method was trained.

    The list is empty unless there are at least two, and every run is on one of them.
    """
    splits = [{run.split for run in method.runs} for method in methods]
    if None in splits[0] or len(splits[0]) < 2 or any(each != splits[0] for each in splits):
        return []
    return sorted(filter(None, splits[0]))
