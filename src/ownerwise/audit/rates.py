"""How well an attack tells members from others: areas under curves, accuracies and rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta, rankdata


class Measured(NamedTuple):
    """A measured value with a confidence interval."""

    value: float
    low: float
    high: float


def auc(inside: np.ndarray, outside: np.ndarray, failure: float) -> Measured:
    """Return the area under the curve: the probability that a member has the higher score.

    The interval uses the variance of DeLong, DeLong and Clarke-Pearson (1988), but at least the
    variance of scores that carry no information.
    """
    value, error = auc_and_error(inside, outside)
    reach = -float(ndtri(failure / 2)) * error
    return Measured(value, max(0.0, value - reach), min(1.0, value + reach))


def auc_and_error(inside: np.ndarray, outside: np.ndarray) -> tuple[float, float]:
    """Return the area under the curve and its standard error."""
    first, second = len(inside), len(outside)
    if min(first, second) < 2:
        return 0.5, 0.5
    ranks = rankdata(np.concatenate([inside, outside]))
    above = (ranks[:first] - rankdata(inside)) / second  # for each member, the others below it
    below = 1 - (ranks[first:] - rankdata(outside)) / first
    value = float(above.mean())
    variance = above.var(ddof=1) / first + below.var(ddof=1) / second
    uninformative = (first + second + 1) / (12 * first * second)
    return value, float(max(variance, uninformative) ** 0.5)


def share(count: int, total: int, failure: float) -> Measured:
    """Return a rate with the interval of Clopper and Pearson (1934)."""
    if not total:
        return Measured(0.0, 0.0, 1.0)
    low = float(beta.ppf(failure / 2, count, total - count + 1)) if count else 0.0
    high = 1.0
    if count < total:
        high = float(beta.ppf(1 - failure / 2, count + 1, total - count))
    return Measured(count / total, low, high)
