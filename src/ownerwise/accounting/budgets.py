"""The budgets of many owners, grouped by delta and, where it matters, by number of records."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MAX_DELTAS = 64
_MAX_LEVELS = 16


def record_levels(records: np.ndarray) -> np.ndarray:
    """Return the numbers of records, at least 1, rounded UP so that few distinct ones remain.

    The cost of an owner's records together rises with their number, so it is never understated.
    """
    counts = np.maximum(np.asarray(records), 1).astype(np.int64)
    distinct = np.unique(counts)
    if len(distinct) <= _MAX_LEVELS:
        return counts
    ends = np.unique(np.ceil(np.geomspace(distinct[0], distinct[-1], _MAX_LEVELS)).astype(np.int64))
    ends[-1] = distinct[-1]
    return ends[np.searchsorted(ends, counts)]


class Budgets:
    """Epsilon and delta of every owner, grouped by delta and by number of records.

    The numbers of records, if given, are those whose cost must stay within the budget together;
    there should be few distinct ones (`record_levels`). By default, a budget is for one record. If
    there are more than 64 distinct deltas, they are rounded DOWN to a grid of 64. Each owner's
    cost is then computed at their own delta or at one slightly below it.
    """

    def __init__(self, epsilon: np.ndarray, delta: np.ndarray, records: np.ndarray | None = None):
        self.epsilon = np.asarray(epsilon, dtype=np.float64)
        values, index = np.unique(delta, return_inverse=True)
        if len(values) > _MAX_DELTAS:
            grid = np.geomspace(values[0], values[-1], _MAX_DELTAS + 1)[:-1]
            grid[0] = values[0]
            index = (np.searchsorted(grid, values, side="right") - 1)[index]
            values = grid
        levels, level = np.ones(1, dtype=np.int64), np.zeros(len(index), dtype=np.int64)
        if records is not None:
            levels, level = np.unique(records, return_inverse=True)
        index = index * len(levels) + level
        order = np.argsort(index, kind="stable")
        bounds = np.searchsorted(index[order], np.arange(len(values) * len(levels) + 1))
        parts = [order[first:last] for first, last in pairwise(bounds)]
        pairs = [(float(delta), int(count)) for delta in values for count in levels]
        self.groups = [
            BudgetGroup(number, delta, members, count)
            for number, ((delta, count), members) in enumerate(zip(pairs, parts, strict=True))
            if len(members)
        ]
        """One group for each distinct delta and number of records."""


@dataclass(frozen=True)
class BudgetGroup:
    """The owners who share a delta and a number of records.

    Attributes:
        number: index of the group.
        delta: the delta.
        members: the owners' positions.
        records: number of records whose cost must stay within the budget together.
    """

    number: int
    delta: float
    members: np.ndarray
    records: int = 1
