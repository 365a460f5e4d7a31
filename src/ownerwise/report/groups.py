"""The validation groups in a report: which ones are shown, in what order, and their names.

Up to 50 groups are shown by name. If there are more and all have budgets, they are merged into
ranges of epsilon, because 1,000 curves are unreadable and individual owners should not be exposed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.evaluation import budget_ranges, is_pooled
from ownerwise.runs import Run
from ownerwise.wording import span

MOST_NAMED = 50
_NOUNS = {"owners": ("Owner", "owners"), "classes": ("Class", "classes")}


@dataclass(frozen=True)
class ValidationGroup:
    """A validation group, or several groups shown as one.

    Attributes:
        name: the name shown.
        members: names of the groups in the runs' histories.
        epsilon: the group's budget (the mean if it has several members); None if unknown.
    """

    name: str
    members: tuple[str, ...]
    epsilon: float | None

    @property
    def pooled(self) -> bool:
        """Whether this is a class of budgets, or of several small groups."""
        return len(self.members) > 1 or is_pooled(self.name)

    def of(self, evaluation: dict[str, Any], key: str) -> float:
        """Return the mean of "recall" or "loss" over the members in one evaluation."""
        values = [evaluation["groups"][name].get(key) for name in self.members]
        return float(np.mean([np.nan if value is None else value for value in values]))


def groups_of(runs: Sequence[Run], source: str | None) -> tuple[ValidationGroup, ...]:
    """Return the groups that appear in every evaluation of every run, strictest first."""
    if source is None:
        return ()
    evaluations = [
        line[kind] for run in runs for line in run.history for kind in (source, "validation")
        if line.get(kind)
    ]  # fmt: skip
    common = set.intersection(*(set(each.get("groups") or {}) for each in evaluations))
    budgets = {name: eps for run in reversed(runs) for name, eps in run.group_budgets.items()}
    groups = [ValidationGroup(name, (name,), budgets.get(name)) for name in common]
    if len(groups) > MOST_NAMED and all(group.epsilon is not None for group in groups):
        units = " or ".join(sorted({run.plan.unit for run in runs}, reverse=True))
        groups = _ranges(groups, nouns_of(runs)[1], units)
    return tuple(sorted(groups, key=_order))


def nouns_of(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the singular and plural noun for groups; "group" if the runs have different kinds."""
    kinds = {str(run.config.get("groups_are")) for run in runs}
    return _NOUNS.get(kinds.pop() if len(kinds) == 1 else "", ("Group", "groups"))


def by_member(
    groups: Sequence[ValidationGroup], budgets: dict[str, float]
) -> list[ValidationGroup]:
    """Return each member as a separate group with its own budget."""
    names = [name for group in groups for name in group.members]
    return [ValidationGroup(name, (name,), budgets.get(name)) for name in names]


def _order(group: ValidationGroup) -> tuple:
    parts = re.split(r"(\d+)", group.name)
    natural = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return (group.epsilon is None, group.epsilon or 0.0, natural)


def _ranges(groups: list[ValidationGroup], noun: str, units: str) -> list[ValidationGroup]:
    """Merge groups with the same epsilon, or in the same range if there are many values."""
    epsilon = np.array([group.epsilon for group in groups], dtype=np.float64)
    index = budget_ranges(epsilon)
    merged = []
    for number in np.unique(index):
        at = np.flatnonzero(index == number)
        members = tuple(sorted(groups[i].name for i in at))
        values = span(epsilon[at].min(), epsilon[at].max())
        name = f"ε {values} per {units} ({len(members)} {noun})"
        merged.append(ValidationGroup(name, members, float(epsilon[at].mean())))
    return merged


def most_telling(
    groups: Sequence[ValidationGroup], recalls: Sequence[float], most: int
) -> list[ValidationGroup]:
    """Return up to `most` groups in order, with preference for the strictest, worst and laxest.

    Args:
        groups: ordered from the strictest to the laxest.
        recalls: each group's recall at the end of training.
        most: the largest number of groups to return.
    """
    by_recall = np.argsort(recalls, kind="stable")
    queues = [range(len(groups)), by_recall, range(len(groups) - 1, -1, -1)]
    chosen: set[int] = set()
    for ranks in zip(*queues, strict=True):
        for at in ranks:
            if len(chosen) < most:
                chosen.add(int(at))
    return [group for at, group in enumerate(groups) if at in chosen]
