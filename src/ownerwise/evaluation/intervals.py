"""95% intervals for shares and areas, also if one owner has many of the evaluated records.

An estimate of a share is a mean over records. Its variance is computed from each record's
influence on it, summed by owner if owners have several records (a cluster-robust variance, with
Student's t). The interval is Wilson's score interval for the number of independent records that
would have the same variance. Wilson (1927); for areas under ROC curves, the influences are the
structural components of DeLong et al. (1988), and the variance is at least that of Hanley and
McNeil (1982), because DeLong's is too small for areas close to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """An estimate and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def record(self) -> dict[str, float]:
        """Return the estimate as JSON types."""
        return {"value": self.value, "low": self.low, "high": self.high}


def share(hits: np.ndarray, owners: np.ndarray | None = None) -> Estimate:
    """Return the share of hits, given one truth value per record.

    Args:
        hits: whether each record is a hit.
        owners: the number of each record's owner; None if the records are independent.
    """
    hits = np.asarray(hits, dtype=np.float64)
    value = float(hits.mean())
    return area(value, hits - value, owners)


def area(
    value: float,
    influence: np.ndarray,
    owners: np.ndarray | None,
    least_variance: float = 0.0,
    smallest: int | None = None,
) -> Estimate:
    """Return the interval of an estimate between 0 and 1.

    Args:
        value: the estimate.
        influence: each record's influence on it; the estimate's error is the mean of these.
        owners: see `share`.
        least_variance: another estimate of the variance, which is used if it is larger.
        smallest: the number of independent records to assume if both variances are zero, as they
            are at 0 and 1; by default the number of records, or of owners.
    """
    units = units_of(influence, owners)
    variance = float(np.square(units.sums).sum()) / len(influence) ** 2 * units.correction
    variance = max(variance, least_variance)
    if variance > 0:
        records = min(value * (1 - value) / variance, len(influence))
    else:
        records = min(units.count, units.count if smallest is None else smallest)
    return Estimate(value, *_wilson(value, records, units.quantile))


def difference(values: np.ndarray, owners: np.ndarray | None) -> Estimate:
    """Return the mean of differences between −1 and 1, one per record, with a normal interval."""
    mean = float(values.mean())
    units = units_of(values - mean, owners)
    variance = float(np.square(units.sums).sum()) / len(values) ** 2 * units.correction
    half = units.quantile * math.sqrt(variance) if variance > 0 else 0.0
    return Estimate(mean, max(mean - half, -1.0), min(mean + half, 1.0))


@dataclass(frozen=True)
class Units:
    """Independent units (owners, or single records), each with the sum of its records' values."""

    sums: np.ndarray
    count: int
    correction: float
    quantile: float


def units_of(values: np.ndarray, owners: np.ndarray | None) -> Units:
    """Return the independent units of these records; `values` is [records] or [records, bins]."""
    if owners is None:
        return Units(values, len(values), 1.0, float(stats.norm.ppf(0.5 + LEVEL / 2)))
    _, index = np.unique(owners, return_inverse=True)
    count = int(index.max()) + 1
    sums = np.zeros((count, *values.shape[1:]))
    np.add.at(sums, index, values)
    if count == 1:  # the spread between owners cannot be estimated
        return Units(sums, 1, 1.0, math.inf)
    quantile = float(stats.t.ppf(0.5 + LEVEL / 2, count - 1))
    return Units(sums, count, count / (count - 1), quantile)


def _wilson(value: float, records: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a share, for a number of records that need not be whole."""
    if math.isinf(quantile) or records <= 0:
        return 0.0, 1.0
    square = quantile**2 / records
    middle = (value + square / 2) / (1 + square)
    half = math.sqrt(square * (value * (1 - value) + square / 4)) / (1 + square)
    return max(min(middle - half, value), 0.0), min(max(middle + half, value), 1.0)
