"""Renyi accounting for the Poisson-subsampled Gaussian mechanism on a dense grid of orders.

A sparse grid is very costly for strict owners: their best order is in the hundreds, where common
grids have few entries. This grid contains real orders from 1.02 up to where the moments explode,
with order - 1 spaced 5% apart, and then 0.2% apart around the best one. For every owner, the loss
compared with the best real order is negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ownerwise.accounting.dominating_pairs import GaussianPair, Pair
from ownerwise.accounting.owner_pair import OwnerPair
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

_SPACING = 1.05
_FINE = 50  # orders between the neighbours of the best one
_LOWEST = 0.02


class Segment(NamedTuple):
    """Consecutive identical steps of a run."""

    steps: int
    sampling_rate: float
    pair: Pair | OwnerPair


def order_grid(highest: float, spacing: float = _SPACING) -> np.ndarray:
    """Return orders minus one, geometrically spaced up to `highest`."""
    count = int(np.ceil(np.log(highest / _LOWEST) / np.log(spacing))) + 1
    return np.geomspace(_LOWEST, highest, count)


def convert(log_moment_sums: np.ndarray, excess_orders: np.ndarray, delta: float) -> np.ndarray:
    """Return the epsilon that each order 1 + excess guarantees.

    Reference: Balle, Barthe, Gaboardi, Hsu, Sato (2020), "Hypothesis Testing Interpretations and
    Renyi Differential Privacy", Theorem 21.
    """
    renyi = log_moment_sums / excess_orders
    order = 1.0 + excess_orders
    return renyi + np.log1p(-1.0 / order) - (np.log(delta) + np.log(order)) / excess_orders


def epsilon(
    sampling_rate: float,
    multiplier: float,
    schedule: Schedule,
    delta: float,
    *,
    closing: float = math.inf,
    records: int = 1,
) -> float:
    """Return epsilon at `delta` after the steps of `schedule` at (rate, multiplier).

    If `closing` is finite, a Gaussian mechanism with that multiplier, which uses all records,
    follows the last step. With `records` above 1, epsilon holds for that many records of one owner,
    added or removed together.
    """
    parts = segments_of(sampling_rate, multiplier, schedule, closing=closing, records=records)
    if not parts:
        return 0.0
    excess = order_grid(highest_order(parts))
    best = int(np.argmin(_bounds(parts, delta, excess)))
    around = excess[max(best - 1, 0)], excess[min(best + 1, len(excess) - 1)]
    fine = np.geomspace(*around, _FINE)
    return max(float(np.min(_bounds(parts, delta, fine))), 0.0)


def segments_of(
    sampling_rate: float,
    multiplier: float,
    schedule: Schedule,
    *,
    closing: float = math.inf,
    records: int = 1,
) -> list[Segment]:
    """Return the parts of a run that cost anything; the arguments are those of `epsilon`."""
    pair: GaussianPair | OwnerPair = GaussianPair(multiplier)
    if records > 1 and sampling_rate == 1.0:
        pair = GaussianPair(multiplier / records)
    elif records > 1 and sampling_rate > 0.0:
        pair = OwnerPair.whole(multiplier, sampling_rate, records)
    parts = [Segment(n, sampling_rate, pair.times(factor)) for n, factor in schedule.segments]
    if sampling_rate == 0.0 or schedule.steps == 0:
        parts = []
    if closing < math.inf:
        parts.append(Segment(1, 1.0, GaussianPair(closing)))
    return parts


def highest_order(parts: Sequence[Segment]) -> float:
    """Return the largest order worth evaluating for all parts."""
    return min(part.pair.highest_order(part.sampling_rate) for part in parts)


def _bounds(parts: Sequence[Segment], delta: float, excess: np.ndarray) -> np.ndarray:
    """Return the epsilon that each order 1 + excess guarantees."""
    return convert(log_moment_sums(parts, excess), excess, delta)


def log_moment_sums(parts: Sequence[Segment], excess: np.ndarray) -> np.ndarray:
    """Return order - 1 times the Renyi divergence of all parts, at each order 1 + excess.

    It is the larger of both directions: a record (or all records of an owner) added, or removed.
    """
    total = np.zeros_like(excess)
    for count, rate, pair in parts:
        total += count * pair.log_moments(rate, 1.0 + excess)
    if any(isinstance(part.pair, OwnerPair) for part in parts):
        # The other direction; for a single record, it never costs more (see `moments`).
        adding = np.zeros_like(excess)
        for count, rate, pair in parts:
            adding += count * pair.log_moments(rate, -excess)
        total = np.maximum(total, adding)
    if not np.isfinite(total).all() or (total < 0).any():
        _, rate, pair = min(parts, key=lambda part: part.pair.multiplier)
        raise AccountingError(
            f"the moments at sampling rate {rate:g} and noise multiplier {pair.multiplier:g} are "
            "infinite or negative; expected finite, non-negative numbers. Use a larger noise "
            "multiplier"
        )
    return total
