"""Budget classes: owners with the same budget or, if there are many, with similar budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.accounting import LARGEST_OWNER_EPSILON
from ownerwise.wording import span

_MOST_CLASSES = 12
_RANGES = 8

MORE = f"more than {LARGEST_OWNER_EPSILON:g}"
NOT_COMPUTED = "not computed"

Range = tuple[float, float]
"""Lowest and highest value among the owners of a class."""


@dataclass(frozen=True, eq=False)
class BudgetClass:
    """A plan's values for owners whose budgets are the same, or nearly the same.

    Attributes:
        unit: what each epsilon holds for: "record" or "owner".
        members: positions of the owners in the plan, strictest first.
        records: total number of records that the owners declare.
        batch_share: fraction of the expected batch that they, or their records, make up.
        epsilon_spent: epsilon per unit of the plan (record or owner) after all planned steps.
        most_records: the largest number of records that one of the owners declares.
        owner_epsilon: epsilon for all records of an owner together, after all planned steps;
            infinite if above 100, NaN if it cannot be computed.
        record_epsilon: epsilon for a single record, after all planned steps; None if owners are
            sampled.
        owner: id of the owner if this is the row of a single owner, else None.
    """

    unit: str
    members: np.ndarray
    records: int
    epsilon: Range
    delta: Range
    sampling_rate: Range
    clip_norm: Range
    noise_multiplier: Range
    batch_share: float
    epsilon_spent: Range
    most_records: int
    owner_epsilon: Range
    record_epsilon: Range | None
    owner: str | None = None

    @property
    def owners(self) -> int:
        """Number of owners."""
        return len(self.members)

    @property
    def name(self) -> str:
        """The promised epsilon as text, such as "ε 0.5 to 1 per record"."""
        return f"ε {span(*self.epsilon)} per {self.unit}"

    def epsilon_per(self, unit: str) -> Range:
        """Return the epsilon for each "owner" or "record" after all planned steps."""
        if unit == "owner":
            return self.owner_epsilon
        assert self.record_epsilon is not None
        return self.record_epsilon

    def figures(self) -> dict[str, Any]:
        """Return the class as JSON types; `name` is the owner's id, or the number of owners."""
        return {
            "name": str(self.owners) if self.owner is None else self.owner,
            "records": self.records,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "sampling_rate": self.sampling_rate,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "batch_share": self.batch_share,
            "epsilon_spent": self.epsilon_spent,
            "most_records_per_owner": self.most_records,
            "owner_epsilon": [_json(value) for value in self.owner_epsilon],
            "record_epsilon": self.record_epsilon,
        }


def _json(value: float) -> float | str:
    """Return an owner's epsilon as a JSON type; JSON has no infinity and no NaN."""
    if math.isnan(value):
        return NOT_COMPUTED
    return value if math.isfinite(value) else MORE


def class_members(targets: np.ndarray, deltas: np.ndarray) -> list[np.ndarray]:
    """Return the owners of each budget class; with many budgets, a class is a range of epsilon."""
    first, index = distinct_budgets(targets, deltas)
    if len(first) > _MOST_CLASSES:
        edges = np.geomspace(targets.min(), targets.max(), _RANGES + 1)[1:-1]
        index = np.searchsorted(edges, targets, side="right")
    return [np.flatnonzero(index == number) for number in np.unique(index)]


def distinct_budgets(targets: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one owner for each distinct (epsilon, delta), and the index of each owner's budget.

    Budgets are sorted by delta, then by epsilon.
    """
    order = np.lexsort((targets, deltas))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(targets[order]) != 0) | (np.diff(deltas[order]) != 0)
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.cumsum(new) - 1
    return order[new], index
