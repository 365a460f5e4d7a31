"""The validation groups of a report: which are shown, in which order, under which names.

Up to 50 groups are shown by name. With more, groups that have budgets are gathered into ranges of
epsilon: nobody reads 1,000 curves, and single owners are not put on display.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.runs import (
    Run,
)

MOST_NAMED = 50
_RANGES = 8
_NOUNS = {"owners": ("Owner", "owners"), "classes": ("Class", "classes")}


@dataclass(frozen=True)
class Group:
    """A validation group, or several that are shown as one.

    Attributes:
        name: what is shown.
        members: names of the groups in the runs' histories.
        epsilon: budget of the group (the mean over several), None if unknown.
    """

    name: str
    members: tuple[str, ...]
    epsilon: float | None

    def of(self, evaluation: dict[str, Any], key: str) -> float:
        """Return the mean of "recall" or "loss" over the members in one evaluation."""
        values = [evaluation["groups"][name].get(key) for name in self.members]
        return float(np.mean([np.nan if value is None else value for value in values]))


def groups_of(runs: Sequence[Run], source: str | None) -> tuple[Group, ...]:
    """Return the groups that every evaluation of every run has, the strictest first."""
    if source is None:
        return ()
    evaluations = [
        line[kind] for run in runs for line in run.history for kind in (source, "validation")
        if line.get(kind)
    ]  # fmt: skip
    common = set.intersection(*(set(found.get("groups") or {}) for found in evaluations))
    budgets = {name: eps for run in reversed(runs) for name, eps in run.group_budgets.items()}
    groups = [Group(name, (name,), budgets.get(name)) for name in common]
    if len(groups) > MOST_NAMED and all(group.epsilon is not None for group in groups):
        groups = _ranges(groups, nouns_of(runs)[1])
    return tuple(sorted(groups, key=_order))


def nouns_of(runs: Sequence[Run]) -> tuple[str, str]:
    """Return what one group and several are called: owners or classes where all runs say so."""
    kinds = {str(run.config.get("groups_are")) for run in runs}
    return _NOUNS.get(kinds.pop() if len(kinds) == 1 else "", ("Group", "groups"))


def by_member(groups: Sequence[Group], budgets: dict[str, float]) -> list[Group]:
    """Return every member as a group of its own, with its own budget."""
    return [Group(name, (name,), budgets.get(name)) for group in groups for name in group.members]


def _order(group: Group) -> tuple:
    parts = re.split(r"(\d+)", group.name)
    natural = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return (group.epsilon is None, group.epsilon or 0.0, natural)


def _ranges(groups: list[Group], noun: str) -> list[Group]:
    """Gather groups into classes of one epsilon, or ranges of epsilon if there are many."""
    epsilon = np.array([group.epsilon for group in groups], dtype=np.float64)
    values, index = np.unique(epsilon, return_inverse=True)
    if len(values) > _RANGES:
        edges = np.geomspace(values[0], values[-1], _RANGES + 1)[1:-1]
        index = np.searchsorted(edges, epsilon, side="right")
    gathered = []
    for number in np.unique(index):
        at = np.flatnonzero(index == number)
        low, high = epsilon[at].min(), epsilon[at].max()
        span = f"ε {low:.3g}" if low == high else f"ε {low:.3g} to {high:.3g}"
        members = tuple(sorted(groups[i].name for i in at))
        gathered.append(
            Group(f"{span} ({len(members)} {noun})", members, float(epsilon[at].mean()))
        )
    return gathered


def most_telling(groups: Sequence[Group], recalls: Sequence[float], most: int) -> list[Group]:
    """Return at most `most` groups in the given order: strictest, laxest and worst come first.

    Args:
        groups: ordered from the strictest to the laxest.
        recalls: recall of each group at the end.
        most: number of groups wanted.
    """
    by_recall = np.argsort(recalls, kind="stable")
    queues = [range(len(groups)), by_recall, range(len(groups) - 1, -1, -1)]
    chosen: set[int] = set()
    for ranks in zip(*queues, strict=True):
        for at in ranks:
            if len(chosen) < most:
                chosen.add(int(at))
    return [group for at, group in enumerate(groups) if at in chosen]
