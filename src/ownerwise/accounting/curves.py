"""Sampling rates or noise multipliers for many budgets, found without looping over owners.

For a fixed delta, the quantity that the planner needs (a sampling rate, a noise multiplier) is a
smooth monotone function of epsilon. This module solves for it at a few nodes, interpolates with a
cubic spline in log-log space, and checks the result against the accountant between the nodes. A
node is added to every interval in which the interpolated value misses its target by more than the
tolerance. If there are only a few distinct budgets, all of them are nodes and nothing is
interpolated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from scipy.interpolate import CubicSpline, interp1d

from ownerwise.accounting.budgets import BudgetGroup, Budgets
from ownerwise.accounting.gaussian import gaussian_mu
from ownerwise.accounting.release import joint_multiplier
from ownerwise.accounting.roots import find_root
from ownerwise.accounting.run_cost import LARGEST_SHIFT, Exposure, RunCost
from ownerwise.errors import AccountingError

LogQuantity = Callable[[int, np.ndarray], np.ndarray]
"""Logarithm of a quantity, as a function of (number of the group of budgets, log epsilon)."""

SAMPLING_RATE = "sampling rate"
SAMPLING_RATE_RANGE = (1e-9, 1.0)
MULTIPLIER = "noise multiplier"
MULTIPLIER_RANGE = (0.2, 1e5)
TOLERANCE = 2e-4
"""Relative error in epsilon that solving and interpolating may each introduce."""
OWNER_TOLERANCE = 1e-3
"""The same for several records together, whose cost jumps by up to 4e-4 where its grid changes.
With a smaller tolerance, nodes would crowd around the jumps, and the spline would overshoot."""

MAX_NODES = 24  # with at most this many distinct budgets per delta, each one is a node
MAX_OWNER_NODES = 20  # the same for the cost of several records, which takes longer to compute
_ROUGH_NODES = 6
_ROUGH_LEVELS = 4
_TOO_MUCH = 30.0  # logarithm of a cost that cannot be computed because it is enormous


class BudgetCurve:
    """A positive quantity as a function of (epsilon, delta): one curve per delta.

    `quantity` is its name. `unreachable` lists the nodes (epsilon, delta) that no value within the
    bounds can satisfy.
    """

    def __init__(self, quantity: str):
        self.quantity = quantity
        self.nodes: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # log epsilon, log value
        self.unreachable: list[tuple[float, float]] = []
        self.last_equation: _Equation | None = None

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


def sampling_rate_curve(
    budgets: Budgets,
    log_multiplier: LogQuantity,
    run: RunCost,
    guess: LogQuantity | None = None,
    least_sampling_rate: float | None = None,
) -> BudgetCurve:
    """Return the sampling rate that spends each budget, given the noise multiplier.

    `log_multiplier(number, log_epsilon)` is the logarithm of the multiplier for the delta at index
    `number`. Sampling rates are capped at 1; at the cap, part of the budget may remain unspent.
    With `least_sampling_rate`, records that are drawn at a higher rate contribute proportionally
    less to the release.
    """
    curve = BudgetCurve(SAMPLING_RATE)
    for group in budgets.groups:
        tolerance = tolerance_of(group.records)
        equation = _RateEquation(run, group, tolerance, log_multiplier, least_sampling_rate)
        _add_nodes(curve, equation, budgets, guess)
    return curve


def rough_sampling_rate_curve(
    budgets: Budgets,
    log_multiplier: LogQuantity,
    run: RunCost,
    guess: LogQuantity | None = None,
    least_sampling_rate: float | None = None,
) -> BudgetCurve:
    """Return approximate sampling rates, solved for only a few of the numbers of records K.

    For a given epsilon, the expected number of drawn records, K times the sampling rate, changes
    little with K, and smoothly with 1/K. The other numbers of records are interpolated, without a
    check: use the result as a guess only.
    """
    curve = BudgetCurve(SAMPLING_RATE)
    for delta in {group.delta: None for group in budgets.groups}:
        groups = [group for group in budgets.groups if group.delta == delta]
        members = np.concatenate([group.members for group in groups])
        least, most = budgets.epsilon[members].min(), budgets.epsilon[members].max()
        x = np.log(np.geomspace(least, most, _ROUGH_NODES) if least < most else np.array([least]))
        few = np.unique(np.linspace(0, len(groups) - 1, _ROUGH_LEVELS).round().astype(int))
        drawn = []
        for group in (groups[at] for at in few):
            tolerance = tolerance_of(group.records)
            equation = _RateEquation(run, group, tolerance, log_multiplier, least_sampling_rate)
            rates = _solutions(curve, equation, x, guess)
            curve.nodes[group.number] = x, rates
            drawn.append(rates + np.log(group.records))
        inverse = np.array([1.0 / group.records for group in groups])
        order = few[::-1]  # so that the inverse rises
        spread = interp1d(inverse[order], np.array(drawn)[::-1], axis=0, bounds_error=False)
        for group, place in zip(groups, inverse, strict=True):
            rates = spread(place) if len(few) > 1 else drawn[0]
            curve.nodes[group.number] = x, np.minimum(rates - np.log(group.records), 0.0)
    return curve


def multiplier_curve(
    budgets: Budgets,
    sampling_rate: float,
    run: RunCost,
    guess: LogQuantity | None = None,
    tolerance: float = TOLERANCE,
) -> BudgetCurve:
    """Return the noise multiplier that spends each budget at a single sampling rate."""
    curve = BudgetCurve(MULTIPLIER)
    for group in budgets.groups:
        own = max(tolerance, tolerance_of(group.records))
        _add_nodes(curve, _MultiplierEquation(run, group, own, sampling_rate), budgets, guess)
    return curve


def _add_nodes(
    curve: BudgetCurve, equation: _Equation, budgets: Budgets, guess: LogQuantity | None
) -> None:
    """Solve the equation for the owners of one delta, and add the nodes to the curve."""
    group = equation.group
    targets = np.unique(budgets.epsilon[group.members])
    most = max_nodes(group.records)
    exact = len(targets) <= most
    x = np.log(targets if exact else np.geomspace(targets[0], targets[-1], most // 2))
    y = _solutions(curve, equation, x, guess)
    curve.nodes[group.number] = (x, y) if exact else _refined(x, y, equation)


def _solutions(
    curve: BudgetCurve, equation: _Equation, x: np.ndarray, guess: LogQuantity | None
) -> np.ndarray:
    """Return the solutions for these log epsilons, and add unreachable ones to the curve's list."""
    group, before = equation.group, curve.last_equation
    curve.last_equation = equation
    if guess is None and before is not None and before.group.delta == group.delta:
        # the solution for the last number of records, shifted by the change in the rough formula
        shift = equation.rough_solution(float(x[0])) - before.rough_solution(float(x[0]))
        guess = lambda _, at: curve.log_at(before.group.number, at) + shift  # noqa: E731
    values: list[float] = []
    for at, point in enumerate(x.tolist()):
        if guess is not None:
            start = float(guess(group.number, np.array([point]))[0])
        else:
            start = equation.rough_solution(point)
            if values:  # the neighbour's solution, shifted by the change in the rough formula
                start += values[-1] - equation.rough_solution(float(x[at - 1]))
        values.append(equation.solution(point, start))
        if equation.is_unreachable(point, values[-1]):
            curve.unreachable.append((float(np.exp(point)), group.delta))
    return np.array(values)


def tolerance_of(records: int) -> float:
    """Return the relative error in epsilon that solving and interpolating may each introduce."""
    return TOLERANCE if records == 1 else OWNER_TOLERANCE


def max_nodes(records: int) -> int:
    """Return the number of distinct budgets up to which each one is a node."""
    return MAX_NODES if records == 1 else MAX_OWNER_NODES


def _refined(x: np.ndarray, y: np.ndarray, equation: _Equation) -> tuple[np.ndarray, np.ndarray]:
    """Add nodes until the interpolated curve meets its targets between all nodes.

    An interval in which the curve reaches a bound has a kink; it is halved until its length is
    negligible.
    """
    bounds, tolerance = equation.bounds, equation.tolerance
    doubtful = list(pairwise(x.tolist()))
    while doubtful:
        again = []
        for left, right in doubtful:
            ends = y[np.searchsorted(x, [left, right])]
            kink = (ends[0] in bounds) != (ends[1] in bounds)
            if ends[0] == ends[1] or right - left < tolerance:
                continue
            middle = 0.5 * (left + right)
            value = float(_interpolate(x, y, np.array([middle]))[0])
            if not kink and abs(equation.miss(value, middle)) <= tolerance:
                continue
            at = int(np.searchsorted(x, middle))
            x, y = np.insert(x, at, middle), np.insert(y, at, equation.solution(middle, value))
            again += [(left, middle), (middle, right)]
        doubtful = again
    return x, y


def _interpolate(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the cubic spline through (x, y), clipped to the values of the neighbouring nodes."""
    if len(x) == 1:
        return np.full(np.shape(at), y[0])
    at = np.clip(at, x[0], x[-1])
    right = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    ends = y[right - 1], y[right]
    return np.clip(CubicSpline(x, y)(at), np.minimum(*ends), np.maximum(*ends))


@dataclass(frozen=True)
class _Equation(ABC):
    """The equation "cost = epsilon" for one delta; the unknown is the logarithm of a quantity."""

    run: RunCost
    group: BudgetGroup
    tolerance: float

    slope: ClassVar[float]
    bounds: ClassVar[tuple[float, float]]

    @abstractmethod
    def exposure(self, value: float, log_epsilon: float) -> Exposure:
        """Return a record's exposure at this value, apart from the closing release."""

    @abstractmethod
    def rough_solution(self, log_epsilon: float) -> float:
        """Return an approximate solution, from a formula."""

    def miss(self, value: float, log_epsilon: float) -> float:
        """Return the amount by which the logarithm of the cost exceeds its target."""
        exposure = self.exposure(value, log_epsilon)._replace(closing=self.closing(log_epsilon))
        records = self.group.records
        if records == 1:
            epsilon = self.run.epsilon(exposure, self.group.delta)
            return float(np.log(max(epsilon, 1e-12))) - log_epsilon
        if exposure.sampling_rate * records > LARGEST_SHIFT * exposure.multiplier:
            return _TOO_MUCH
        try:
            epsilon = self.run.epsilon(exposure, self.group.delta, records)
        except AccountingError:  # far from any budget, the cost is too large to be computed
            return _TOO_MUCH
        return min(_TOO_MUCH, float(np.log(max(epsilon, 1e-12))) - log_epsilon)

    def closing(self, log_epsilon: float) -> float:
        """Return the sensitivity of the closing release for records with this budget."""
        if self.run.closing is None:
            return 1.0
        return self.run.closing.sensitivity(float(np.exp(log_epsilon)), self.group.delta)

    def mu_for_steps(self, log_epsilon: float) -> float:
        """Return the approximate budget left for the steps, as the mu of a Gaussian mechanism."""
        mu = gaussian_mu(float(np.exp(log_epsilon)), self.group.delta)
        spent = 1.0 / self.run.without_sampling(self.closing(log_epsilon), self.group.records)
        return float(np.sqrt(max(mu**2 - spent**2, 0.01 * mu**2)))

    def solution(self, log_epsilon: float, start: float) -> float:
        """Return the solution, or the bound nearest to it."""
        low, high = self.bounds
        return find_root(
            lambda value: self.miss(value, log_epsilon),
            start, self.slope, low=low, high=high, tolerance=0.5 * self.tolerance,
        )  # fmt: skip

    def is_unreachable(self, log_epsilon: float, solution: float) -> bool:
        """Return whether even the safest value costs too much."""
        safest = self.bounds[0] if self.slope > 0 else self.bounds[1]
        return solution == safest and self.miss(safest, log_epsilon) > self.tolerance


@dataclass(frozen=True)
class _RateEquation(_Equation):
    log_multiplier: LogQuantity
    least_sampling_rate: float | None

    slope = 1.0
    bounds = (float(np.log(SAMPLING_RATE_RANGE[0])), 0.0)

    def exposure(self, value: float, log_epsilon: float) -> Exposure:
        sampling_rate = float(np.exp(value))
        sensitivity = 1.0
        if self.least_sampling_rate is not None:
            sensitivity = min(1.0, self.least_sampling_rate / sampling_rate)
        return Exposure(sampling_rate, self._multiplier(log_epsilon), sensitivity)

    def rough_solution(self, log_epsilon: float) -> float:
        multiplier, release = self._multiplier(log_epsilon), self.run.release
        if release is not None and self.least_sampling_rate is None:
            multiplier = joint_multiplier(multiplier, release.std)
        growth = np.expm1(min(1.0 / multiplier**2, 50.0))
        mu = self.mu_for_steps(log_epsilon)
        together = self.group.records * np.sqrt(self.run.schedule.steps * growth)
        return float(np.log(mu / together))

    def _multiplier(self, log_epsilon: float) -> float:
        return float(np.exp(self.log_multiplier(self.group.number, np.array([log_epsilon]))[0]))


@dataclass(frozen=True)
class _MultiplierEquation(_Equation):
    sampling_rate: float

    slope = -1.0
    bounds = (float(np.log(MULTIPLIER_RANGE[0])), float(np.log(MULTIPLIER_RANGE[1])))

    def exposure(self, value: float, log_epsilon: float) -> Exposure:
        return Exposure(self.sampling_rate, float(np.exp(value)))

    def rough_solution(self, log_epsilon: float) -> float:
        mu = self.mu_for_steps(log_epsilon)
        steps = self.run.schedule.steps
        drawn = self.group.records * self.sampling_rate
        return -0.5 * float(np.log(np.log1p(mu**2 / (steps * drawn**2))))
