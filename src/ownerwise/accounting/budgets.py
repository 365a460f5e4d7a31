"""The budgets of many owners, grouped by delta."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MAX_DELTAS = 64


class Budgets:
    """Epsilon and delta of every owner, grouped by delta.

    If there are more than 64 distinct deltas, they are rounded DOWN to a grid of 64. Each owner's
    cost is then computed at their own delta or at one slightly below it.
    """

    def __init__(self, epsilon: np.ndarray, delta: np.ndarray):
        self.epsilon = np.asarray(epsilon, dtype=np.float64)
        values, index = np.unique(delta, return_inverse=True)
        if len(values) > _MAX_DELTAS:
            grid = np.geomspace(values[0], values[-1], _MAX_DELTAS + 1)[:-1]
            grid[0] = values[0]
            index = (np.searchsorted(grid, values, side="right") - 1)[index]
            values = grid
        order = np.argsort(index, kind="stable")
        bounds = np.searchsorted(index[order], np.arange(len(values) + 1))
        parts = [order[first:last] for first, last in pairwise(bounds)]
        self.groups = [
            DeltaGroup(number, float(delta), members)
            for number, (delta, members) in enumerate(zip(values, parts, strict=True))
            if len(members)
        ]
        """One group for each distinct delta."""


@dataclass(frozen=True)
class DeltaGroup:
    """The owners who share a delta: the delta's index and value, and the owners' positions."""

    number: int
    delta: float
    members: np.ndarray
