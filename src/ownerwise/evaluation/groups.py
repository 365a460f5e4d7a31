"""Recall in each group of evaluated records, and the groups that are too small or too personal.

A group of a handful of records says nothing: one of three records misclassified is no "recall of
67%". A group that is a single person says too much. Both are pooled by budget before anything is
evaluated, so neither their names nor their own results reach the history, the progress bar or a
report. One exception: budgets are public, so the result of a class with a single owner, such as
"ε 2 per owner (1 owner)", is that owner's result on validation records, which no guarantee covers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.wording import name_of, span

SMALLEST_GROUP = 10
"""The smallest number of records in a group with results of its own."""

_RANGES = 8


_POOLED = re.compile(r"\(\d+ (owner|group)s?\)$")


def is_pooled(name: str) -> bool:
    """Return whether this is the name of several groups, such as "ε 2 per owner (17 owners)"."""
    return _POOLED.search(name) is not None


def budget_ranges(epsilon: np.ndarray) -> np.ndarray:
    """Return the number of each budget's class: one value, or a range if there are many values."""
    values, index = np.unique(epsilon, return_inverse=True)
    if len(values) > _RANGES:
        edges = np.geomspace(values[0], values[-1], _RANGES + 1)[1:-1]
        index = np.searchsorted(edges, epsilon, side="right")
    return index


def pool_groups(
    groups: np.ndarray, budgets: Mapping[str, float], unit: str, *, persons: bool
) -> tuple[np.ndarray, dict[str, float]]:
    """Return each record's group, with classes of budgets in place of small groups.

    Args:
        groups: the group of each record.
        budgets: epsilon of the groups, by name, as far as it is known.
        unit: what each epsilon holds for: "record" or "owner".
        persons: whether each group is one person; then all groups are pooled, whatever their size.

    Returns:
        The groups, and the (mean) epsilon of each class of budgets.
    """
    names, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    pooled = np.flatnonzero((counts < SMALLEST_GROUP) | persons)
    if not len(pooled):
        return groups, {}
    known = {at: budgets[name_of(names[at].item())] for at in pooled.tolist()
             if name_of(names[at].item()) in budgets}  # fmt: skip
    new_names: list[Any] = [name_of(name) for name in names.tolist()]
    classes: dict[str, float] = {}
    members = np.array(list(known), dtype=np.int64)
    epsilon = np.array(list(known.values()))
    number = budget_ranges(epsilon)
    for which in np.unique(number):
        values = epsilon[number == which]
        name = f"ε {span(values.min(), values.max())} per {unit} ({_counted(len(values), persons)})"
        classes[name] = float(values.mean())
        for at in members[number == which].tolist():
            new_names[at] = name
    without = [at for at in pooled.tolist() if at not in known]
    for at in without:
        new_names[at] = f"others ({_counted(len(without), persons)})"
    return np.array(new_names)[index], classes


def _counted(number: int, persons: bool) -> str:
    noun = "owner" if persons else "group"
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class GroupRecalls:
    """Recall in every group, and summaries over groups."""

    recalls: dict[Any, float]
    overall: float

    @property
    def worst(self) -> float:
        """Recall in the worst group."""
        return min(self.recalls.values())

    @property
    def spread(self) -> float:
        """Standard deviation of recall over groups."""
        return float(np.std(list(self.recalls.values())))

    @property
    def balanced(self) -> float:
        """Mean recall over groups."""
        return float(np.mean(list(self.recalls.values())))


def group_recalls(predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> GroupRecalls:
    """Return the fraction of correct predictions in each group and overall."""
    correct = np.asarray(predicted) == np.asarray(actual)
    names = np.asarray(groups)
    recalls = {name.item(): float(correct[names == name].mean()) for name in np.unique(names)}
    return GroupRecalls(recalls, float(correct.mean()))


def owner_mean(correct: np.ndarray, owners: np.ndarray) -> dict[str, float]:
    """Return the number of owners, and the mean over owners of each one's share of correct records.

    Every owner counts equally, however many records they have.
    """
    count, mean = mean_over_owners(correct.astype(np.float64), owners)
    return {"owners": count, "owner_accuracy": mean}


def mean_over_owners(values: np.ndarray, owners: np.ndarray) -> tuple[int, float]:
    """Return the number of owners, and the mean over owners of the mean of each one's values."""
    _, index, counts = np.unique(owners, return_inverse=True, return_counts=True)
    return len(counts), float((np.bincount(index, weights=values) / counts).mean())
