"""Sampling rates or noise multipliers for many budgets, found without looping over owners.

For a fixed delta, the quantity that the planner needs (a sampling rate, a noise multiplier) is a
smooth monotone function of epsilon. This module solves for it at a few nodes, interpolates with a
cubic spline in logarithms, and checks the result between the nodes with the accountant itself. A
node is added to every interval in which the interpolated value misses its target by more than the
tolerance. If there are only a few distinct budgets, all of them are nodes and nothing is
interpolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import log_ndtr, ndtr

from ownerwise.accounting.release import PaidRelease, joint_multiplier, owner_epsilon
from ownerwise.accounting.roots import find_root
from ownerwise.accounting.schedule import Schedule

Cost = tuple[float, float, float]
"""Sampling rate, noise multiplier, release sensitivity."""

LogQuantity = Callable[[int, np.ndarray], np.ndarray]
"""Logarithm of a quantity, as a function of (index of the delta, log epsilon)."""

SAMPLING_RATE_RANGE = (1e-9, 1.0)
MULTIPLIER_RANGE = (0.2, 1e5)
TOLERANCE = 2e-4
"""Relative error in epsilon that solving and interpolating may each introduce."""

MAX_NODES = 24  # with at most this many distinct budgets per delta, each one is a node
_MAX_DELTAS = 64


class Budgets:
    """Epsilon and delta of every owner, grouped by delta.

    If there are more than 64 distinct deltas, they are rounded DOWN to a grid of 64. Each owner is
    then accounted for at a delta at or slightly below their own.
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


class BudgetCurve:
    """A positive quantity as a function of (epsilon, delta): one curve per delta.

    `unreachable` lists the nodes (epsilon, delta) that no value within the bounds can satisfy.
    """

    def __init__(self):
        self.nodes: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # log epsilon, log value
        self.unreachable: list[tuple[float, float]] = []

    def log_at(self, number: int, log_epsilon: np.ndarray) -> np.ndarray:
        """Return the log of the quantity at each log epsilon, for the delta at index `number`."""
        x, y = self.nodes[number]
        return _interpolate(x, y, log_epsilon)

    def __call__(self, budgets: Budgets) -> np.ndarray:
        """Return the quantity for every owner."""
        result = np.empty(len(budgets.epsilon))
        for group in budgets.groups:
            points = np.log(budgets.epsilon[group.members])
            result[group.members] = np.exp(self.log_at(group.number, points))
        return result


def _interpolate(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the cubic spline through (x, y), clipped to the values of the neighbouring nodes."""
    if len(x) == 1:
        return np.full(np.shape(at), y[0])
    at = np.clip(at, x[0], x[-1])
    right = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    ends = y[right - 1], y[right]
    return np.clip(CubicSpline(x, y)(at), np.minimum(*ends), np.maximum(*ends))


def sampling_rate_curve(
    budgets: Budgets,
    log_multiplier: LogQuantity,
    schedule: Schedule,
    accountant: str,
    guess: LogQuantity | None = None,
    release: PaidRelease | None = None,
    least_sampling_rate: float | None = None,
) -> BudgetCurve:
    """Return the sampling rate that spends each budget, given the noise multiplier.

    `log_multiplier(number, log_epsilon)` is the logarithm of the multiplier for the delta at index
    `number`. Sampling rates are capped at 1; at the cap, part of the budget may remain unspent.
    With `least_sampling_rate`, records that are drawn at a higher rate contribute proportionally
    less to the release.
    """

    def cost(log_sampling_rate: float, number: int, log_epsilon: float) -> Cost:
        multiplier = np.exp(log_multiplier(number, np.array([log_epsilon]))[0])
        sampling_rate = float(np.exp(log_sampling_rate))
        sensitivity = 1.0
        if least_sampling_rate is not None:
            sensitivity = min(1.0, least_sampling_rate / sampling_rate)
        return sampling_rate, float(multiplier), sensitivity

    def first_guess(number: int, log_epsilon: float, delta: float) -> float:
        _, multiplier, _ = cost(0.0, number, log_epsilon)
        if release is not None and least_sampling_rate is None:
            multiplier = joint_multiplier(multiplier, release.std)
        mu = gaussian_mu(float(np.exp(log_epsilon)), delta)
        growth = np.expm1(min(1.0 / multiplier**2, 50.0))
        return float(np.log(mu / np.sqrt(schedule.steps * growth)))

    bounds = (float(np.log(SAMPLING_RATE_RANGE[0])), 0.0)
    return _solve(
        budgets, cost, first_guess, guess, 1.0, bounds, schedule, accountant, release, TOLERANCE
    )


def multiplier_curve(
    budgets: Budgets,
    sampling_rate: float,
    schedule: Schedule,
    accountant: str,
    guess: LogQuantity | None = None,
    release: PaidRelease | None = None,
    tolerance: float = TOLERANCE,
) -> BudgetCurve:
    """Return the noise multiplier that spends each budget at a single sampling rate."""

    def cost(log_multiplier: float, number: int, log_epsilon: float) -> Cost:
        return sampling_rate, float(np.exp(log_multiplier)), 1.0

    def first_guess(number: int, log_epsilon: float, delta: float) -> float:
        mu = gaussian_mu(float(np.exp(log_epsilon)), delta)
        return -0.5 * float(np.log(np.log1p(mu**2 / (schedule.steps * sampling_rate**2))))

    bounds = (float(np.log(MULTIPLIER_RANGE[0])), float(np.log(MULTIPLIER_RANGE[1])))
    return _solve(
        budgets, cost, first_guess, guess, -1.0, bounds, schedule, accountant, release, tolerance
    )


def _solve(
    budgets: Budgets,
    cost: Callable[[float, int, float], Cost],
    first_guess: Callable[[int, float, float], float],
    guess: LogQuantity | None,
    slope: float,
    bounds: tuple[float, float],
    schedule: Schedule,
    accountant: str,
    release: PaidRelease | None,
    tolerance: float,
) -> BudgetCurve:
    """Return the curve of values at which `cost` exactly equals each epsilon."""
    safest = bounds[0] if slope > 0 else bounds[1]
    curve = BudgetCurve()
    for group in budgets.groups:
        number, delta = group.number, group.delta
        targets = np.unique(budgets.epsilon[group.members])

        def miss(value: float, log_epsilon: float, number=number, delta=delta) -> float:
            sampling_rate, multiplier, sensitivity = cost(value, number, log_epsilon)
            epsilon = owner_epsilon(
                accountant, sampling_rate, multiplier, schedule, delta, release, sensitivity
            )
            return float(np.log(max(epsilon, 1e-12))) - log_epsilon

        def solve(log_epsilon: float, start: float, miss=miss) -> float:
            return find_root(
                lambda value: miss(value, log_epsilon), start, slope, *bounds, 0.5 * tolerance
            )

        exact = len(targets) <= MAX_NODES
        x = np.log(targets if exact else np.geomspace(targets[0], targets[-1], MAX_NODES // 2))
        values: list[float] = []
        for point in x:
            if guess is not None:
                start = float(guess(number, np.array([point]))[0])
            else:
                start = first_guess(number, float(point), delta)
                if values:  # the neighbour's solution, shifted by the change in the rough formula
                    start += values[-1] - first_guess(number, float(x[len(values) - 1]), delta)
            values.append(solve(float(point), start))
            if values[-1] == safest and miss(safest, float(point)) > tolerance:
                curve.unreachable.append((float(np.exp(point)), delta))
        y = np.array(values)
        if not exact:
            x, y = _refine(x, y, miss, solve, bounds, tolerance)
        curve.nodes[number] = (x, y)
    return curve


def _refine(
    x: np.ndarray,
    y: np.ndarray,
    miss: Callable[[float, float], float],
    solve: Callable[[float, float], float],
    bounds: tuple[float, float],
    tolerance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Add nodes until the interpolated curve meets its targets between all nodes.

    An interval in which the curve reaches a bound has a kink; it is halved until its length is
    negligible.
    """
    doubtful = [(float(a), float(b)) for a, b in pairwise(x)]
    while doubtful:
        again = []
        for left, right in doubtful:
            ends = y[np.searchsorted(x, [left, right])]
            kink = (ends[0] in bounds) != (ends[1] in bounds)
            if ends[0] == ends[1] or right - left < tolerance:
                continue
            middle = 0.5 * (left + right)
            value = float(_interpolate(x, y, np.array([middle]))[0])
            if not kink and abs(miss(value, middle)) <= tolerance:
                continue
            at = int(np.searchsorted(x, middle))
            x, y = np.insert(x, at, middle), np.insert(y, at, solve(middle, value))
            again += [(left, middle), (middle, right)]
        doubtful = again
    return x, y


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return mu such that N(mu, 1) and N(0, 1) are exactly (epsilon, delta)-indistinguishable.

    Reference: Dong, Roth, Su (2022), "Gaussian Differential Privacy", Corollary 1.
    """

    def miss(log_mu: float) -> float:
        mu = np.exp(log_mu)
        second = np.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
        value = ndtr(-epsilon / mu + mu / 2) - second
        return float(np.log(max(value, 1e-300)) - np.log(delta))

    return float(np.exp(find_root(miss, np.log(epsilon / 4), 5.0, -18.0, 6.0, 1e-6)))
