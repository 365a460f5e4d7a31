"""Epsilon for all records of each owner together, for many owners.

Owners with equal parameters share one evaluation. If there are too many distinct parameters, they
are rounded to the unfavourable side: each owner is then evaluated with at least their own sampling
rate, sensitivities and number of records, and with at most their own noise multiplier and delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ownerwise.accounting.owner_pair import most_drawn
from ownerwise.accounting.pld import owner_tail
from ownerwise.accounting.run_cost import LARGEST_OWNER_EPSILON, LARGEST_SHIFT, Exposure, RunCost
from ownerwise.errors import AccountingError

_MOST_CLASSES = 300
_MOST_LEVELS = 20  # of the number of records, if there are many distinct exposures as well


def owner_epsilon(
    run: RunCost,
    exposures: Sequence[np.ndarray],
    records: np.ndarray,
    delta: np.ndarray,
    per_record: np.ndarray,
    overflow: Callable[[int], float] | None = None,
) -> np.ndarray:
    """Return each owner's epsilon if all of their records are added or removed together.

    The result is infinite if it is above `LARGEST_OWNER_EPSILON`, and NaN if no bound can be
    computed. For an owner with one record, it is the epsilon of that record.

    Args:
        run: the run and its accountant.
        exposures: the parts of a record's `Exposure`, one array per part.
        records: the largest number of records that each owner may have.
        delta: one value per owner.
        per_record: the epsilon of one record of each owner.
        overflow: for a step that fails if its batch is too large, the probability that this
            happens in any step if k records are added to those of all other owners. Epsilon is then
            always computed with privacy loss distributions.
    """
    result = np.array(per_record, dtype=np.float64)
    several = np.flatnonzero(records > 1)
    if not len(several):
        return result
    owners = np.stack([*exposures, delta, records], axis=1)[several].astype(np.float64)
    classes, index = _distinct(owners)
    if len(classes) > _MOST_CLASSES:
        rounded, again = _distinct(_rounded(classes))
        classes, index = rounded, again[index]
    if overflow is not None:
        run = replace(run, accountant="pld")
    values = np.empty(len(classes))
    previous = classes[0]
    for at, values_of in enumerate(classes):  # sorted; the number of records rises last
        same = at > 0 and np.array_equal(previous[:-1], values_of[:-1])
        # More records never cost less.
        values[at] = np.inf if same and values[at - 1] == np.inf else _one(run, values_of, overflow)
        previous = values_of
    found = np.maximum(values[index], result[several])  # at least as much as one record, or NaN
    found[result[several] > LARGEST_OWNER_EPSILON] = np.inf
    result[several] = found
    return result


def _one(run: RunCost, values: np.ndarray, overflow: Callable[[int], float] | None) -> float:
    *exposure, delta, records = values.tolist()
    exposure, count = Exposure(*exposure), int(records)
    shift = exposure.sampling_rate * count / exposure.multiplier  # of a single step, on average
    if shift > LARGEST_SHIFT and run.schedule.steps:
        return np.inf
    if 1 / run.without_sampling(exposure.closing, count) > LARGEST_SHIFT:
        return np.inf  # the releases from all records alone cost far more than can be told apart
    if overflow is not None and run.schedule.steps:
        tail = owner_tail(delta / 2, run.schedule.steps)
        left = delta - overflow(most_drawn(exposure.sampling_rate, count, tail))
        left -= run.schedule.steps * tail  # more are drawn; not every accountant cuts this off
    else:
        left = delta
    try:
        # If too little of delta is left, only the unbounded case can be told.
        epsilon = run.epsilon(exposure, left if left >= delta / 2 else delta, count)
    except AccountingError:
        return np.nan
    if epsilon > LARGEST_OWNER_EPSILON:
        return np.inf
    return epsilon if left >= delta / 2 else np.nan


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows, sorted by their first column first, and each row's index."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (np.diff(ordered, axis=0) != 0).any(axis=1)
    index = np.empty(len(rows), dtype=np.int64)
    index[order] = np.cumsum(new) - 1
    return ordered[new], index


def _rounded(rows: np.ndarray) -> np.ndarray:
    """Return the rows, rounded to the unfavourable side so that few distinct ones remain."""
    exposed, index = _distinct(rows[:, :-1])
    counts, at = np.unique(rows[:, -1], return_inverse=True)
    levels = max(_MOST_LEVELS, _MOST_CLASSES // len(exposed))
    if len(counts) > levels:
        ends = np.ceil(np.geomspace(counts[0], counts[-1], levels))
        ends[-1] = counts[-1]
        counts = ends[np.searchsorted(ends, counts)]
    bins = max(1, _MOST_CLASSES // len(np.unique(counts)))
    if len(exposed) > bins:
        position = exposed[:, 0] / exposed[:, 1]  # rises with the cost
        position = np.log(np.maximum(position, 1e-12))
        edges = np.linspace(position.min(), position.max(), bins + 1)[1:-1]
        number = np.searchsorted(edges, position)
        for one in np.unique(number):
            members = number == one
            rate, multiplier, release, closing, delta = exposed[members].T
            exposed[members] = (
                rate.max(), multiplier.min(), release.max(), closing.max(), delta.min(),
            )  # fmt: skip
    return np.column_stack([exposed[index], counts[at]])
