"""How good a classifier's predictions are: discrimination, calibration, and the simplest rival.

All results are measured on validation or test records, which no guarantee covers. Each has a 95%
interval for chance in these records (see `intervals`), and rests on at least `SMALLEST_GROUP` of
them.

- majority: the share of the most frequent class among the evaluated records, which a model that
  always answers this class gets right, and the gain in accuracy over that model.
- AUC: the probability that a record of a class gets a higher score for it than a record of another
  class does; with more than two classes, the mean over classes.
- sensitivity and specificity: with two classes, the shares of the second and of the first class
  that are classified correctly.
- recalls: with more classes, the share of each class that is classified correctly.
- calibration error: the mean distance between predicted probability and observed share, over bins
  of equally many records. With two classes, the probability is that of the second class; with more,
  that of the predicted class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from ownerwise.evaluation.groups import SMALLEST_GROUP
from ownerwise.evaluation.intervals import LEVEL, Estimate, area, difference, share, units_of
from ownerwise.wording import name_of

MOST_CLASSES = 50
"""The largest number of classes for which an AUC is computed."""

_BINS = 10
_DRAWS = 4000


def classification(
    predicted: np.ndarray,
    actual: np.ndarray,
    probabilities: np.ndarray | None,
    owners: np.ndarray | None = None,
    *,
    overall: bool = True,
) -> dict[str, Any]:
    """Return these results as JSON types; those that rest on too few records are left out.

    Args:
        predicted: the predicted class of each record.
        actual: its class.
        probabilities: the probability of each class, [records, classes]; None if unknown.
        owners: each record's owner; None if the records are independent.
        overall: whether these are all evaluated records, not a group. For groups, the share of the
            most frequent class and the reliability curve are left out.
    """
    if owners is not None and len(np.unique(owners)) == len(owners):
        owners = None
    correct = predicted == actual
    found: dict[str, Any] = {"accuracy": share(correct, owners).record()}
    if overall:
        found["majority"] = _majority(correct, actual, owners)
    if probabilities is None:
        return found
    classes, second = probabilities.shape[1], actual == 1
    # One of the two alone would reveal the other, even if that rests on a handful of records.
    if classes == 2 and min(second.sum(), (~second).sum()) >= SMALLEST_GROUP:
        for name, of_class in (("sensitivity", second), ("specificity", ~second)):
            of_owners = None if owners is None else owners[of_class]
            found[name] = share(correct[of_class], of_owners).record()
    if overall and 2 < classes <= MOST_CLASSES:
        found |= _recalls(correct, actual, owners)
    if classes <= MOST_CLASSES and (ranked := auc(actual, probabilities, owners)) is not None:
        found["auc"] = ranked.record()
    stated, observed = _statements(predicted, actual, probabilities)
    points, error = calibration(stated, observed, owners)
    if error is not None:
        found["calibration_error"] = error.record()
    if overall and points:
        found["reliability"] = points
    return found


def _recalls(
    correct: np.ndarray, actual: np.ndarray, owners: np.ndarray | None
) -> dict[str, dict[str, Any]]:
    """Return the recall of each class; nothing if any class has too few records.

    The mean over classes is known, so the others would reveal the recall of a class left out.
    """
    names, counts = np.unique(actual, return_counts=True)
    if counts.min() < SMALLEST_GROUP:
        return {}
    inside = {name_of(name): actual == name for name in names.tolist()}
    return {
        "recalls": {
            name: share(correct[of], None if owners is None else owners[of]).record()
            for name, of in inside.items()
        }
    }


def _majority(correct: np.ndarray, actual: np.ndarray, owners: np.ndarray | None) -> dict[str, Any]:
    names, counts = np.unique(actual, return_counts=True)
    largest = names[counts.argmax()]
    always = actual == largest
    gain = difference(correct.astype(np.float64) - always, owners)
    return {
        "class": name_of(largest.item()),
        "share": float(always.mean()),
        "gain": gain.record(),
    }


def auc(
    actual: np.ndarray, scores: np.ndarray, owners: np.ndarray | None = None
) -> Estimate | None:
    """Return the area under the ROC curve, averaged over classes if there are more than two.

    Only classes with at least `SMALLEST_GROUP` records, and as many of other classes, count; None
    if there are none.

    Args:
        actual: the class of each record.
        scores: a score for each class, [records, classes].
        owners: each record's owner; None if the records are independent.
    """
    classes = [1] if scores.shape[1] == 2 else range(scores.shape[1])
    values, influences, deviations, smallest = [], [], [], []
    for number in classes:
        inside = actual == number
        count = int(inside.sum())
        if min(count, len(actual) - count) < SMALLEST_GROUP:
            continue
        value, influence = _ranked(scores[:, number], inside)
        values.append(value)
        influences.append(influence)
        deviations.append(np.sqrt(_hanley(value, count, len(actual) - count)))
        smallest.append(min(count, len(actual) - count))
    if not values:
        return None
    least = float(np.mean(deviations)) ** 2
    return area(float(np.mean(values)), np.mean(influences, axis=0), owners, least, min(smallest))


def _ranked(scores: np.ndarray, inside: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the AUC of a score, and each record's influence on it (DeLong's components)."""
    ranks = stats.rankdata(scores)
    count, others = int(inside.sum()), int((~inside).sum())
    above = np.empty(len(scores))
    above[inside] = (ranks[inside] - stats.rankdata(scores[inside])) / others
    above[~inside] = 1 - (ranks[~inside] - stats.rankdata(scores[~inside])) / count
    value = float(above[inside].mean())
    influence = above - value
    for part, size in ((inside, count), (~inside, others)):
        influence[part] *= len(scores) / size * np.sqrt(size / (size - 1))
    return value, influence


def _hanley(value: float, inside: int, outside: int) -> float:
    """Return the variance of an AUC by Hanley and McNeil, as in method 5 of Newcombe (2006)."""
    others = (inside + outside) / 2 - 1
    spread = 1 + others * ((1 - value) / (2 - value) + value / (1 + value))
    return value * (1 - value) * spread / (inside * outside)


def _statements(
    predicted: np.ndarray, actual: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a probability that is stated for each record, and whether it came true."""
    if probabilities.shape[1] == 2:
        return probabilities[:, 1], actual == 1
    within = predicted.clip(0, probabilities.shape[1] - 1).astype(np.int64)
    return probabilities[np.arange(len(predicted)), within], predicted == actual


def calibration(
    stated: np.ndarray, observed: np.ndarray, owners: np.ndarray | None = None
) -> tuple[list[dict[str, Any]], Estimate | None]:
    """Return the points of the reliability curve, and the expected calibration error.

    The interval of the error is conservative. Chance changes the mean distance by no more than the
    mean size of the chance errors in the bins; the interval extends by the 95% quantile of that
    size on either side.

    Args:
        stated: the probability stated for each record.
        observed: whether it came true.
        owners: each record's owner; None if the records are independent.
    """
    bins = _bins(stated)
    if bins is None:
        return [], None
    count = int(bins.max()) + 1
    inside = bins[:, None] == np.arange(count)  # [records, bins]
    records = inside.sum(axis=0)
    observed = observed.astype(np.float64)
    gaps = (inside.T @ (observed - stated)) / records
    points = []
    for number in range(count):
        of_bin = inside[:, number]
        found = share(observed[of_bin], None if owners is None else owners[of_bin])
        points.append(
            {
                "predicted": float(stated[of_bin].mean()),
                "observed": found.value,
                "low": found.low,
                "high": found.high,
                "records": int(records[number]),
            }
        )
    weights = records / len(stated)
    error = float(weights @ np.abs(gaps))
    likely = _likely_error(inside, observed - stated - gaps[bins], observed, owners)
    return points, Estimate(error, max(error - likely, 0.0), min(error + likely, 1.0))


def _likely_error(
    inside: np.ndarray, residuals: np.ndarray, observed: np.ndarray, owners: np.ndarray | None
) -> float:
    """Return the 95% quantile of the mean size of the chance errors of the bins."""
    records = inside.sum(axis=0)
    smoothed = (inside.T @ observed + 2) / (records + 4)  # never 0 or 1 (Agresti and Coull)
    covariance = np.diag(records * smoothed * (1 - smoothed))
    scale = 1.0
    if owners is not None:
        units = units_of(residuals[:, None] * inside, owners)
        if np.isinf(units.quantile):
            return 1.0
        shared = units.sums.T @ units.sums * units.correction
        covariance = shared + np.diag((np.diag(covariance) - np.diag(shared)).clip(min=0))
        scale = units.quantile / float(stats.norm.ppf(0.5 + LEVEL / 2))
    values, vectors = np.linalg.eigh(covariance)
    errors = _normal_draws()[:, : len(records)] * np.sqrt(values.clip(min=0)) @ vectors.T
    return scale * float(np.quantile(np.abs(errors).sum(axis=1), LEVEL)) / len(residuals)


@cache
def _normal_draws() -> np.ndarray:
    """Return the same standard normal numbers each time, for a quantile."""
    return np.random.default_rng(0).standard_normal((_DRAWS, _BINS))


def _bins(stated: np.ndarray) -> np.ndarray | None:
    """Return the bin of each record; equal probabilities share one. None if there are too few."""
    count = min(_BINS, len(stated) // SMALLEST_GROUP)
    if not count:
        return None
    edges = np.quantile(stated, np.arange(1, count) / count)
    _, bins, records = np.unique(
        np.searchsorted(edges, stated, side="right"), return_inverse=True, return_counts=True
    )
    kept, number, waiting = np.zeros(len(records), dtype=np.int64), 0, 0
    for at, size in enumerate(records):  # merge bins that ties made too small
        kept[at] = number
        waiting += size
        if waiting >= SMALLEST_GROUP and records[at + 1 :].sum() >= SMALLEST_GROUP:
            number, waiting = number + 1, 0
    return kept[bins]
