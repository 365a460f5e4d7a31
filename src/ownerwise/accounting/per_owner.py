"""Epsilon for each of many owners, without running the accountant once per owner.

The owners in a plan lie on a smooth curve of increasing cost. Epsilon is evaluated at a few nodes
of the curve, interpolated with a cubic spline in log-log space, checked against the accountant
between the nodes, and rounded up. Owners who do not lie on a smooth curve are evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from scipy.interpolate import CubicSpline

from ownerwise.accounting import pld
from ownerwise.accounting.budgets import BudgetGroup, Budgets
from ownerwise.accounting.curves import SAMPLING_RATE_RANGE, max_nodes, tolerance_of
from ownerwise.accounting.owner_pair import most_drawn
from ownerwise.accounting.run_cost import LARGEST_SHIFT, Exposure, RunCost
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

_ENORMOUS = 1e12  # stands for an infinite epsilon, which could not be interpolated
_MAX_ROUNDS = 8  # rounds of adding nodes where a path has corners


def epsilon(
    sampling_rate: np.ndarray | float,
    multiplier: np.ndarray | float,
    steps: int | Schedule | RunCost,
    delta: np.ndarray | float,
    release_sensitivity: np.ndarray | float = 1.0,
    closing_sensitivity: np.ndarray | float = 1.0,
    records: np.ndarray | None = None,
) -> np.ndarray:
    """Return every owner's epsilon after `steps` steps.

    Owners with equal parameters share one evaluation. If the owners with a given delta lie on one
    smooth curve of increasing cost (as in every plan), epsilon is interpolated and rounded up. If
    multipliers do not fall as sampling rates rise, each distinct rate has its own curve.

    Args:
        sampling_rate, multiplier, delta: one value per owner, or one for all.
        steps: number of steps, a schedule, or a `RunCost` (to choose the accountant, or to account
            for additional releases).
        release_sensitivity: the most that one record of each owner can contribute to the release
            of a step.
        closing_sensitivity: the same for the release after training.
        records: the number of records of each owner that are added or removed together; by default
            one. There should be few distinct numbers (`record_levels`). An epsilon that cannot be
            computed because it is too large is infinite.
    """
    run = RunCost.of(steps)
    given = (sampling_rate, multiplier, release_sensitivity, closing_sensitivity, delta)
    given = np.broadcast_arrays(*map(np.atleast_1d, given))
    _check(given)
    *exposures, delta = given
    result = np.zeros(delta.shape)
    if run.schedule.steps == 0 and run.closing is None and run.opening is None:
        return result
    for group in Budgets(np.ones(len(delta)), delta, records).groups:
        rates, multipliers, release, closing = (part[group.members] for part in exposures)
        order = np.lexsort((closing, release, -multipliers, rates))
        members = group.members[order]
        points = np.stack([rates, multipliers, release, closing], axis=1)[order]
        for curve in _curves(points):
            result[members[curve]] = _along_curve(run, points[curve], group)
    return np.where(result < _ENORMOUS, result, np.inf) if records is not None else result


def _curves(points: np.ndarray) -> Iterable[slice]:
    """Return the parts of the sorted points along which the cost rises."""
    if (np.diff(points[:, 1]) <= 0).all():
        return [slice(0, len(points))]
    starts = np.flatnonzero(np.diff(points[:, 0], prepend=-1.0))
    return map(slice, starts, [*starts[1:], len(points)])


def _along_curve(run: RunCost, points: np.ndarray, group: BudgetGroup) -> np.ndarray:
    """Return epsilon, rounded up, for exposures in order of cost, [owners, 4].

    The logarithms of the exposures are points on a path in four dimensions. A point's position
    along the path is log rate - log multiplier, which rises with the cost. Where splines in the
    position follow the path, epsilon is interpolated as a function of the position as well.
    """
    new = np.ones(len(points), dtype=bool)
    new[1:] = (np.diff(points, axis=0) != 0).any(axis=1)
    points, original = points[new], np.cumsum(new) - 1

    def spent(at: int) -> float:
        exposure = Exposure(*points[at].tolist())
        if group.records == 1:
            return run.epsilon(exposure, group.delta)
        shift = exposure.sampling_rate * group.records / exposure.multiplier
        if shift > LARGEST_SHIFT and run.schedule.steps:
            return _ENORMOUS
        return run.epsilon(exposure, group.delta, group.records)

    most, tolerance = max_nodes(group.records), tolerance_of(group.records)

    nodes, aside = np.arange(0), np.arange(len(points))
    path = np.log(np.maximum(points, SAMPLING_RATE_RANGE[0]))
    position = path[:, 0] - path[:, 1]
    if len(points) > 2 * most:
        least = float(points[-1, 1]) * min(factor for _, factor in run.schedule.segments)
        if group.records > 1 and run.schedule.steps:  # several records may be drawn in a step
            tail = pld.owner_tail(group.delta, run.schedule.steps)
            least /= max(1, most_drawn(float(points[-1, 0]), group.records, tail))
        nodes, aside = _path_nodes(position, path, tolerance / (8.0 + 4.0 / least**2), most // 2)
    values = np.empty(len(points))
    if len(nodes):
        smooth = np.setdiff1d(np.arange(len(points)), aside)
        values = _interpolated(position, smooth, nodes, spent, tolerance)
    values[aside] = [spent(int(at)) for at in aside]
    return values[original]


def _path_nodes(
    position: np.ndarray, path: np.ndarray, tolerance: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes whose spline follows the path, and the points that the spline misses.

    Epsilon is a smooth function of an exposure, so it is smooth along the path only where the path
    itself is smooth. Between nodes, the path may have corners that a check of epsilon would miss.
    An error of `tolerance` in the logarithms of the path changes log epsilon by about an eighth of
    the tolerance for epsilon: the slope of log epsilon is at most 2 / m^2 in the log multiplier
    where sampling amplifies privacy, and about 1 in the log rate. If i records of an owner may be
    drawn in a step, with a probability that matters for delta, m is the multiplier divided by i.
    The error is then at most about a third of the tolerance.
    """
    wanted = np.linspace(position[0], position[-1], count)
    nodes = np.minimum(np.searchsorted(position, wanted), len(position) - 1)
    away = np.full(len(position), np.inf)
    for _ in range(_MAX_ROUNDS):
        _, first = np.unique(position[nodes], return_index=True)
        nodes = np.sort(nodes[first])
        if len(nodes) < 2:  # all at the same position
            return nodes[:0], np.arange(len(position))
        away = np.abs(CubicSpline(position[nodes], path[nodes])(position) - path).max(axis=1)
        if (away <= tolerance).all():
            break
        interval = np.searchsorted(nodes, np.arange(len(position)))
        order = np.lexsort((-away, interval))
        worst = order[np.flatnonzero(np.diff(interval[order], prepend=-1))]
        nodes = np.union1d(nodes, worst[away[worst] > tolerance])
    return nodes, np.flatnonzero(away > tolerance)


def _interpolated(
    position: np.ndarray,
    smooth: np.ndarray,
    nodes: np.ndarray,
    spent: Callable[[int], float],
    tolerance: float,
) -> np.ndarray:
    """Return epsilon at every position, from a spline through `spent` at some smooth points.

    Nodes are added at the midpoints of intervals until the spline matches the cost there.
    """
    places, first = np.unique(position[smooth], return_index=True)
    smooth = smooth[first]

    def log_spent(at: int) -> float:
        return float(np.log(max(spent(int(smooth[at])), pld.LEAST_EPSILON)))

    start = np.searchsorted(places, position[nodes]).tolist()
    known = {at: log_spent(at) for at in start}
    doubtful = list(pairwise(start))
    while True:
        at = sorted(known)
        spline = CubicSpline(places[at], [known[i] for i in at])
        again = []
        for left, right in doubtful:
            if right - left < 2:
                continue
            middle = int(np.searchsorted(places, 0.5 * (places[left] + places[right])))
            middle = min(max(middle, left + 1), right - 1)
            known[middle] = log_spent(middle)
            if abs(float(spline(places[middle])) - known[middle]) > tolerance:
                again += [(left, middle), (middle, right)]
        if not again:
            return np.exp(spline(position) + tolerance)
        doubtful = again


def _check(given: Sequence[np.ndarray]) -> None:
    """Raise an error if a value is out of range or is NaN, which fails every comparison."""
    rate, multiplier, release, closing, delta = given
    expected = (
        ("sampling rate", rate, (rate >= 0) & (rate <= 1), "0 to 1"),
        ("noise multiplier", multiplier, (multiplier > 0) & np.isfinite(multiplier), "above 0"),
        ("release sensitivity", release, (release > 0) & (release <= 1), "above 0, at most 1"),
        ("closing sensitivity", closing, (closing >= 0) & (closing <= 1), "0 to 1"),
        ("delta", delta, (delta > 0) & (delta < 1), "between 0 and 1"),
    )
    problems = [
        f"{name} {float(values[np.argmin(good)]):g}: expected {words}"
        for name, values, good, words in expected
        if not good.all()
    ]
    if problems:
        raise AccountingError("; ".join(problems))
