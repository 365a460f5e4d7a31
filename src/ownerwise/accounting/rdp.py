"""Renyi accounting for the Poisson-subsampled Gaussian mechanism on a dense grid of orders.

A sparse grid is very costly for strict owners: their best order is in the hundreds, where common
grids have few entries. This grid contains real orders from 1.02 up to where the moments explode,
with order - 1 spaced 5% apart, and then 0.2% apart around the best one. For every owner, the loss
compared with the best real order is negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ownerwise.accounting.moments import highest_order, log_moments
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

_SPACING = 1.05
_FINE = 50  # orders between the neighbours of the best one
_LOWEST = 0.02


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
) -> float:
    """Return epsilon at `delta` after the steps of `schedule` at (rate, multiplier).

    If `closing` is finite, a Gaussian mechanism with that multiplier, which uses all records,
    follows the last step.
    """
    parts = [(n, sampling_rate, multiplier * factor) for n, factor in schedule.segments]
    if sampling_rate == 0.0 or schedule.steps == 0:
        parts = []
    if closing < math.inf:
        parts.append((1, 1.0, closing))
    if not parts:
        return 0.0
    excess = order_grid(min(highest_order(rate, noise) for _, rate, noise in parts))
    best = int(np.argmin(_bounds(parts, delta, excess)))
    around = excess[max(best - 1, 0)], excess[min(best + 1, len(excess) - 1)]
    fine = np.geomspace(*around, _FINE)
    return max(float(np.min(_bounds(parts, delta, fine))), 0.0)


def _bounds(
    parts: Sequence[tuple[int, float, float]], delta: float, excess: np.ndarray
) -> np.ndarray:
    """Return the epsilon that each order 1 + excess guarantees for parts (count, rate, noise)."""
    total = np.zeros_like(excess)
    for count, rate, noise in parts:
        total += count * log_moments(rate, noise, 1.0 + excess)
    if not np.isfinite(total).all() or (total < 0).any():
        _, rate, noise = min(parts, key=lambda part: part[2])
        raise AccountingError(
            f"the moments at sampling rate {rate:g} and noise multiplier {noise:g} are infinite or "
            "negative; expected finite, non-negative numbers. Use a larger noise multiplier"
        )
    return convert(total, excess, delta)
