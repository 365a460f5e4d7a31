"""Find the sampling rates, clip norms and noise that fit the budgets, for each method.

Notation: sampling rate q, clip norm C, noise multiplier m = noise std / C. For every method, the
budgets determine how three public quantities depend on each other: noise, expected batch size and
number of steps. Two of them are given, and the solver finds the third.

References: Boenisch, Muhl, Dziedzic, Rinberg, Papernot (2023), Algorithms 1 and 2. (In the paper's
Table 6, sigma_scale is an arithmetic mean of the multipliers. The paper's derivation, its clip
norms and this module use the harmonic mean.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.interpolate import CubicSpline

from ownerwise.accounting import (
    MULTIPLIER,
    MULTIPLIER_RANGE,
    BudgetCurve,
    Budgets,
    ClosingRelease,
    LogQuantity,
    OpeningRelease,
    PaidRelease,
    RunCost,
    Schedule,
    find_root,
    gaussian_mu,
    multiplier_curve,
    rough_sampling_rate_curve,
    sampling_rate_curve,
)
from ownerwise.errors import PlanError
from ownerwise.owners import Owners, of_holders
from ownerwise.planning.batch_bounds import delta_reserve

METHODS = ("uniform", "sample", "scale", "both", "individual")
SAFETY = 8e-4
"""Relative margin by which plans stay below each epsilon. It covers the errors due to interpolation
(4e-4) and to the grid of the reference accountant that checks plans (2e-4)."""
OWNER_SAFETY = 4e-3
"""The same for all records of an owner together, whose cost is computed less precisely."""

# Relative tolerances of the searches. A search that must not end on the wrong side of its target
# aims one tolerance away from the target, on the safe side.
_BATCH_TOLERANCE = 1.5e-4
_NOISE_TOLERANCE = 3e-4
_STEPS_TOLERANCE = 2e-4
# If owners with many numbers of records are the unit, the noise is first found with approximate
# rates, then corrected a few times with the exact ones.
_MANY_GROUPS = 6
_ROUGH_TOLERANCE = 2e-3
_CORRECTIONS = 6
_USUAL_SLOPE = 1.5  # of the logarithm of the batch size over that of the noise
_SHARE_NODES = 256  # of the closing release; with more budgets, shares are interpolated
_SHARE_ERROR = 1e-5  # of the logarithm of an interpolated share; measured: below 5e-7
MAX_STEPS = 10_000_000


@dataclass(frozen=True)
class Solution:
    """Noise, sampling rates and clip norms that belong together.

    Attributes:
        noise: noise std divided by the plan's clip norm.
        sampling_rates: one per owner.
        relative_clips: each owner's clip norm divided by the plan's clip norm.
        curve: the sampling rate or noise multiplier for each budget.
    """

    noise: float
    sampling_rates: np.ndarray
    relative_clips: np.ndarray
    curve: BudgetCurve


class Planner:
    """Solves for noise, batch size or steps, using the last curves as initial guesses.

    Args:
        owners, method, mixture, accountant: as for `ownerwise.plan`.
        release: an additional release that is made at every step, if any.
        closing: a release that is made after training, if any.
        reweighted: whether records contribute to the release in inverse proportion to their
            sampling rates, which makes all records count equally; those that are drawn least often
            contribute in full.
        hardened: whether the plan is hardened, which reserves more of every delta.
        elements: how many things may be drawn of each owner, then of each set of owners who share
            records; by default, their records.
        together: how many records of each owner must stay within the owner's budget together; by
            default, each record has the budget by itself.
        opening: a release that is made before training, if any.
    """

    def __init__(
        self,
        owners: Owners,
        method: str,
        mixture: float | None,
        accountant: str,
        release: PaidRelease | None = None,
        closing: ClosingRelease | None = None,
        reweighted: bool = False,
        hardened: bool = False,
        elements: np.ndarray | None = None,
        together: np.ndarray | None = None,
        opening: OpeningRelease | None = None,
    ):
        self.owners = owners
        self.method = method
        self.mixture = mixture
        self.accountant = accountant
        self.release = release
        self.closing = closing
        self.opening = opening
        self.reweighted = reweighted and release is not None
        # the tiny reserve of other plans is within SAFETY
        self.deltas = owners.delta * (1 - delta_reserve(True)) if hardened else owners.delta
        # sets of owners matter only if their records are drawn
        self.elements = (owners.records_of_holders if elements is None else elements).astype(float)
        self.shared = owners.shared if len(self.elements) > len(owners) else None
        self.total = float(self.elements.sum())
        self.together = together
        safety: np.ndarray | float = SAFETY
        if together is not None:
            safety = np.where(together > 1, OWNER_SAFETY, SAFETY)
        self.budgets = Budgets(owners.epsilon * (1 - safety), self.deltas, self.together)
        groups = self.budgets.groups  # each has the smallest delta of its owners
        least = [self.budgets.epsilon[group.members].min() for group in groups]
        self.strictest = Budgets(
            np.array(least),
            np.array([group.delta for group in groups]),
            np.array([group.records for group in groups]),
        )
        self.last_rates: list[tuple[float, BudgetCurve]] = []  # up to two, each with its log noise
        self.last_multipliers: BudgetCurve | None = None

    def find_noise(self, schedule: Schedule, batch_size: float) -> Solution:
        """Return the solution for a given expected batch size."""
        run = self._run(schedule)
        rate = min(1.0, batch_size / self.total)
        ones = np.ones(len(self.owners))
        if self.method == "uniform":
            curve = multiplier_curve(self.strictest, rate, run)
            self._refuse_unreachable(curve)
            return Solution(float(curve(self.strictest).max()), rate * ones, ones, curve)
        if self.method == "scale":
            curve = self._multipliers(run, rate)
            multipliers = curve(self.budgets)
            noise = self.total / self._total(1.0 / multipliers)  # harmonic mean
            return Solution(noise, rate * ones, noise / multipliers, curve)
        return self._find_noise_for_rates(run, batch_size, rate)

    def find_batch(self, schedule: Schedule, noise: float) -> Solution:
        """Return the solution for a given noise, which determines the rates and the batch size."""
        run = self._run(schedule)
        log_noise = float(np.log(noise))
        if self.method in ("uniform", "sample"):
            ones = np.ones(len(self.owners))
            budgets = self.budgets if self.method == "sample" else self.strictest
            curve = self._rates(budgets, lambda _, x: np.full(np.shape(x), log_noise), run)
            self._refuse_unreachable(curve)
            rates = curve(budgets)
            return Solution(
                noise, rates if self.method == "sample" else rates.min() * ones, ones, curve
            )
        low, high = float(np.log(self.total * 1e-7)), float(np.log(self.total))
        guess = high - 4.0
        if self.method == "both":
            return _search(
                lambda log_batch: self._at_noise(run, noise, float(np.exp(log_batch))),
                lambda log_batch, solution: (
                    log_batch - float(np.log(self.batch_size(solution.sampling_rates)))
                ),
                guess, slope=1.0, low=low, high=high,
            )  # fmt: skip

        def excess(log_batch: float) -> float:
            needed = self.find_noise(schedule, float(np.exp(log_batch))).noise
            return float(np.log(needed)) - log_noise + _NOISE_TOLERANCE

        log_batch = find_root(
            excess, guess, slope=1.0, low=low, high=high, tolerance=_NOISE_TOLERANCE
        )
        batch_size = float(np.exp(log_batch))
        solution = self.find_noise(schedule, batch_size)
        return self._with_noise(solution, noise, "a batch of", batch_size)

    def find_steps(self, batch_size: float, noise: float) -> tuple[int, Solution]:
        """Return the number of steps that the budgets allow, and the solution."""
        individual_rates = self.method in ("sample", "both")

        def attempt(steps: int) -> Solution:
            schedule = Schedule.constant(steps)
            if individual_rates:
                return self._at_noise(self._run(schedule), noise, batch_size)
            return self.find_noise(schedule, batch_size)

        def excess(log_steps: float) -> float:
            solution = attempt(max(1, round(float(np.exp(log_steps)))))
            if individual_rates:
                reached = self.batch_size(solution.sampling_rates)
                return float(np.log(batch_size / reached)) + _STEPS_TOLERANCE
            return float(np.log(solution.noise / noise)) + _STEPS_TOLERANCE

        log_steps = find_root(
            excess, np.log(1000.0), slope=0.5, low=0.0, high=np.log(MAX_STEPS),
            tolerance=_STEPS_TOLERANCE,
        )  # fmt: skip
        steps = max(1, int(np.floor(np.exp(log_steps) + 1e-9)))
        solution = attempt(steps)
        if not individual_rates:
            return steps, self._with_noise(solution, noise, "a step count of", steps)
        reached = self.batch_size(solution.sampling_rates)
        if reached < batch_size:
            raise PlanError(
                f"noise_multiplier {noise:g} is too small: in {steps} steps the budgets allow a "
                f"batch of {reached:.4g}, not {batch_size:g}; use more noise, or a smaller batch"
            )
        rates = solution.sampling_rates * (batch_size / reached)
        return steps, replace(solution, sampling_rates=rates)

    def _find_noise_for_rates(self, run: RunCost, batch_size: float, rate: float) -> Solution:
        """Solve `sample` and `both`: find the noise at which the rates add up to the batch size."""
        relative_clips, log_relative = self._relative_clips(run, rate)
        if rate > 1 - 4 * _BATCH_TOLERANCE:  # every record takes part in every step
            curve = self._multipliers(run, 1.0)
            noise = float((curve(self.budgets) * relative_clips).max())
            return Solution(noise, np.full(len(self.owners), rate), relative_clips, curve)

        several = self.together is not None and bool((self.together > 1).any())
        rough_first = several and len(self.budgets.groups) >= _MANY_GROUPS
        tolerance = _ROUGH_TOLERANCE if rough_first else _BATCH_TOLERANCE

        def attempt(log_noise: float, rough: bool = rough_first) -> Solution:
            curve = self._rates_at(log_noise, log_relative, run, rough)
            return Solution(float(np.exp(log_noise)), curve(self.budgets), relative_clips, curve)

        tried: list[tuple[float, float]] = []  # log noise and log batch size

        def excess(log_noise: float, solution: Solution) -> float:
            reached = float(np.log(self.batch_size(solution.sampling_rates)))
            tried.append((float(np.log(solution.noise)), reached))
            return reached - float(np.log(batch_size)) - tolerance

        middle = self._middle()
        rough = float(multiplier_curve(middle, rate, run, tolerance=0.05)(middle)[0])
        solution = _search(
            attempt, excess, float(np.log(rough)),
            slope=2.0, low=np.log(0.05), high=np.log(1e6), longest_step=0.3, tolerance=tolerance,
        )  # fmt: skip
        slope = _slope(tried)
        for number in range(_CORRECTIONS if rough_first else 0):
            solution = attempt(float(np.log(solution.noise)), rough=False)
            if 0 <= (off := excess(0.0, solution) + tolerance) <= 2.1 * tolerance:
                break
            slope = (
                _slope(tried) if number else slope
            )  # of two exact attempts, or of two rough ones
            solution = replace(solution, noise=solution.noise * np.exp((tolerance - off) / slope))
        self._refuse_unreachable(solution.curve)
        reached = self.batch_size(solution.sampling_rates)
        if not 0 <= np.log(reached / batch_size) <= 2.1 * tolerance:
            raise PlanError(
                "no noise multiplier makes the sampling rates add up to a batch of "
                f"{batch_size:g} (nearest: {reached:g} at noise multiplier {solution.noise:g}); "
                "change batch_size or steps, or use method='scale'"
            )
        return replace(solution, sampling_rates=solution.sampling_rates * (batch_size / reached))

    def _at_noise(self, run: RunCost, noise: float, batch_size: float) -> Solution:
        """Return individual rates at a given noise; `batch_size` sets the clip norms of `both`."""
        relative_clips, log_relative = self._relative_clips(run, min(1.0, batch_size / self.total))
        curve = self._rates_at(float(np.log(noise)), log_relative, run)
        self._refuse_unreachable(curve)
        return Solution(noise, curve(self.budgets), relative_clips, curve)

    def _run(self, schedule: Schedule) -> RunCost:
        return RunCost(schedule, self.accountant, self.release, self.closing, self.opening)

    def closing_lengths(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the most that a record of each owner adds to the closing sums, if owners differ.

        The second array, if any, is for the first sum, and the first one for the others.
        """
        if self.closing is None or not self.closing.full_mu:
            return None, None
        shares, pulls = self.closing.lengths(self._closing_mus())
        return (shares if pulls is not None or shares.min() < 1 else None), pulls

    def _closing_mus(self) -> np.ndarray:
        """Return a lower bound on the mu of every owner's budget.

        With many budgets, it is interpolated, and reduced by more than the interpolation can be
        off, so that owners do not contribute more than the solver has accounted for. It varies
        smoothly with the budgets, which keeps the accountant fast (`accounting.per_owner`).
        """
        result = np.empty(len(self.owners))
        for group in self.budgets.groups:
            epsilon = self.budgets.epsilon[group.members]
            nodes, at = np.unique(epsilon, return_inverse=True)
            if len(nodes) <= _SHARE_NODES:
                of_nodes = [gaussian_mu(float(e), group.delta) for e in nodes]
                result[group.members] = np.array(of_nodes)[at]
                continue
            nodes = np.geomspace(nodes[0], nodes[-1], _SHARE_NODES)
            mus = [gaussian_mu(float(e), group.delta) for e in nodes]
            log_mu = CubicSpline(np.log(nodes), np.log(mus))(np.log(epsilon))
            result[group.members] = np.exp(log_mu - _SHARE_ERROR)
        return result

    def batch_size(self, sampling_rates: np.ndarray) -> float:
        """Return the expected batch size at these sampling rates of the owners."""
        return self._total(sampling_rates)

    def _total(self, values: np.ndarray) -> float:
        """Return the sum over all elements of their owner's value, the smallest if several."""
        return float(self.elements @ of_holders(values, self.shared))

    def _middle(self) -> Budgets:
        """Return the median budget, weighted by elements, for an initial guess."""
        order = np.argsort(self.owners.epsilon, kind="stable")
        weights = self.elements if self.shared is None else self.owners.records
        weight = np.cumsum(weights[order])
        at = order[int(np.searchsorted(weight, 0.5 * weight[-1]))]
        together = None if self.together is None else self.together[[at]]
        return Budgets(self.budgets.epsilon[[at]], self.deltas[[at]], together)

    def _multipliers(self, run: RunCost, rate: float) -> BudgetCurve:
        guess = None if self.last_multipliers is None else self.last_multipliers.log_at
        self.last_multipliers = curve = multiplier_curve(self.budgets, rate, run, guess)
        self._refuse_unreachable(curve)
        return curve

    def _relative_clips(self, run: RunCost, rate: float) -> tuple[np.ndarray, LogQuantity]:
        """Return clip norms divided by their average, and the log of this ratio for any budget."""
        if self.mixture is None:
            return np.ones(len(self.owners)), lambda number, x: np.zeros(np.shape(x))
        mixture, curve = self.mixture, self._multipliers(run, rate)
        clips = curve(self.budgets) ** -mixture
        average = self._total(clips) / self.total

        def log_relative(number: int, log_epsilon: np.ndarray) -> np.ndarray:
            return -mixture * curve.log_at(number, log_epsilon) - np.log(average)

        return clips / average, log_relative

    def _rates_at(
        self, log_noise: float, log_relative: LogQuantity, run: RunCost, rough: bool = False
    ) -> BudgetCurve:
        def log_multiplier(number: int, log_epsilon: np.ndarray) -> np.ndarray:
            return log_noise - log_relative(number, log_epsilon)

        guess = self._rate_guess(log_noise)
        curve = self._rates(self.budgets, log_multiplier, run, guess, rough)
        self.last_rates = [*self.last_rates[-1:], (log_noise, curve)]
        return curve

    def _rate_guess(self, log_noise: float) -> LogQuantity | None:
        """Return sampling rates extrapolated from the last two noise levels tried."""
        if not self.last_rates:
            return None
        x0, before = self.last_rates[0]
        x1, last = self.last_rates[-1]
        if x0 == x1:
            return lambda number, at: last.log_at(number, at) + (log_noise - x1)
        weight = (log_noise - x1) / (x1 - x0)
        return lambda number, at: (
            (1 + weight) * last.log_at(number, at) - weight * before.log_at(number, at)
        )

    def _rates(
        self,
        budgets: Budgets,
        log_multiplier: LogQuantity,
        run: RunCost,
        guess: LogQuantity | None = None,
        rough: bool = False,
    ) -> BudgetCurve:
        """Return the curve of sampling rates; a reweighted release depends on the lowest rate."""
        least = None
        if self.reweighted:  # owners with the lowest rate pay for the release in full
            strict = self.strictest if self.mixture is None else self.budgets
            least = float(sampling_rate_curve(strict, log_multiplier, run)(strict).min())
        curve_of = rough_sampling_rate_curve if rough else sampling_rate_curve
        return curve_of(budgets, log_multiplier, run, guess, least)

    def _with_noise(self, solution: Solution, noise: float, what: str, value: float) -> Solution:
        """Return the solution with its noise raised to `noise`, which must not be smaller."""
        if solution.noise > noise:
            raise PlanError(
                f"noise_multiplier {noise:g} is too small: even {what} {value:.4g} requires at "
                f"least {solution.noise:.4g}; use more noise, or larger budgets"
            )
        return replace(solution, noise=noise)

    def _refuse_unreachable(self, curve: BudgetCurve) -> None:
        if curve.quantity == MULTIPLIER:
            limit, ways = f"any noise multiplier up to {MULTIPLIER_RANGE[1]:g}", "a smaller batch"
        else:
            limit, ways = "any sampling rate", "a larger batch, more noise"
        if self.release is not None:
            ways += ", more noise on the release"
        other = ". accountant='pld' is tighter" if self.accountant == "rdp" else ""
        problems = []
        for epsilon, delta in curve.unreachable:
            close = np.isclose(self.budgets.epsilon, epsilon, rtol=1e-6)
            who = np.flatnonzero(close)[:1]
            name, budget = "an owner", epsilon / (1 - SAFETY)
            if len(who):
                name, budget = f"owner {self.owners.ids[who[0]]}", self.owners.epsilon[who[0]]
            problems.append(
                f"{name}: epsilon {budget:g} at delta {delta:g} is too small for "
                f"{limit}; use a larger epsilon or delta, fewer steps, {ways}, or leave out the "
                f"owner's records{other}"
            )
        if problems:
            raise PlanError(problems)


def _slope(tried: list[tuple[float, float]]) -> float:
    """Return the slope of log batch size over log noise between the last two attempts."""
    (x0, y0), (x1, y1) = tried[-2:] if len(tried) > 1 else [(0.0, 0.0), (1.0, _USUAL_SLOPE)]
    slope = (y1 - y0) / (x1 - x0) if x1 != x0 else _USUAL_SLOPE
    return min(max(slope, 0.5), 4.0)


def _search(
    attempt: Callable[[float], Solution],
    excess: Callable[[float, Solution], float],
    guess: float,
    *,
    slope: float,
    low: float,
    high: float,
    longest_step: float = 2.0,
    tolerance: float = _BATCH_TOLERANCE,
) -> Solution:
    """Return the solution at the root of `excess`; for the other arguments see `find_root`."""
    solutions: dict[float, Solution] = {}

    def function(x: float) -> float:
        solutions[x] = attempt(x)
        return excess(x, solutions[x])

    root = find_root(function, guess, slope, low, high, tolerance, longest_step)
    return solutions[root] if root in solutions else attempt(root)
