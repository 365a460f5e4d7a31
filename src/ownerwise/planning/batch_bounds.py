"""Public bounds on the size of a batch: its number of records, and its total clip norm.

Both are sums of independent random terms with known probabilities, so their tails can be bounded
from the plan alone (Chernoff). The data is never used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar

__all__ = ["delta_reserve", "largest_total", "overflow_probability", "overflow_with", "rows_needed"]


def delta_reserve(hardened: bool) -> float:
    """Return the fraction of every delta that is reserved for batches that exceed their bounds."""
    return 1e-2 if hardened else 1e-9


def overflow_probability(deltas: np.ndarray, steps: int, hardened: bool) -> float:
    """Return the largest permitted probability, per step and bound, that a batch exceeds the bound.

    There are two bounds, which share the reserved part of the smallest delta.
    """
    return delta_reserve(hardened) * float(deltas.min()) / (2 * steps)


def rows_needed(rates: np.ndarray, records: np.ndarray, probability: float) -> int:
    """Return a number of rows that a batch fills or exceeds with at most this probability.

    It is never more than the total number of records.
    """
    bound = largest_total(rates, records.astype(np.float64), np.ones(len(rates)), probability)
    return max(1, math.ceil(bound - 1e-9))


def largest_total(
    rates: np.ndarray, records: np.ndarray, amounts: np.ndarray, probability: float
) -> float:
    """Return a total that a batch reaches or exceeds with at most the given probability.

    Each of the `records[o]` records of owner o adds `amounts[o]` with probability `rates[o]`. By
    Chernoff's bound, P(total >= t) <= exp(L(x) - x t) for every x > 0, where L is the logarithm of
    the moment generating function. The smallest t found over all x is returned.

    Args:
        rates, records, amounts: one value per owner; amounts are positive.
        probability: above 0 and below 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability {probability}: expected more than 0 and less than 1")
    unit = float(amounts.max())
    scaled = amounts / unit
    ceiling = float(records @ scaled)

    def total_at(log_x: float) -> float:
        x = math.exp(log_x)
        moments = np.log1p(rates * np.expm1(np.minimum(x * scaled, 700.0)))
        return float((records @ moments - math.log(probability)) / x)

    found = minimize_scalar(total_at, bounds=(-20.0, math.log(700.0)), method="bounded")
    return unit * min(ceiling, float(found.fun))  # pyright: ignore[reportAttributeAccessIssue]


def overflow_with(rates: np.ndarray, records: np.ndarray, rows: int) -> Callable[[int], float]:
    """Return a bound on the probability that a batch leaves fewer than k rows free.

    The bound (Chernoff, over a grid of x) is a function of k. It also holds for the batch of all
    owners but one, because leaving out records can only make a batch smaller.
    """
    grid = np.geomspace(1e-4, 20.0, 200)
    log_moments = np.array([float(records @ np.log1p(rates * np.expm1(x))) for x in grid])

    def probability(k: int) -> float:
        if rows - k >= records.sum():
            return 0.0
        return math.exp(min(0.0, float(np.min(log_moments - grid * (rows - k + 1)))))

    return probability
