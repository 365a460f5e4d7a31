"""Find the sampling rates, clip norms and noise that fit the budgets, for each method.

Notation: sampling rate q, clip norm C, noise multiplier m = noise std / C. For every method, the
budgets determine how three public quantities depend on each other: noise, expected batch size and
number of steps. Two of them are given, and the solver finds the third.

References: Boenisch, Muhl, Dziedzic, Rinberg, Papernot (2023), Algorithms 1 and 2. (In the paper's
Table 6, sigma_scale is an arithmetic mean of the multipliers. The paper's derivation, its clip
norms and this module use the harmonic mean.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ownerwise.accounting import (
    BudgetCurve,
    Budgets,
    LogQuantity,
    PaidRelease,
    Schedule,
    find_root,
    multiplier_curve,
    sampling_rate_curve,
)
from ownerwise.errors import PlanError
from ownerwise.owners import Owners
from ownerwise.planning.batch_bounds import delta_reserve

METHODS = ("uniform", "sample", "scale", "both")
SAFETY = 8e-4
"""Relative margin by which plans stay below each epsilon. It covers the errors due to interpolation
(4e-4) and to the grid of the reference accountant that checks plans (2e-4)."""

_BATCH_TOLERANCE = 1.5e-4
MAX_STEPS = 10_000_000
MIN_CLIP_NORM = 1e-6  # its square must fit in float32, even after scaling and steering


@dataclass(frozen=True)
class Solution:
    """The result of the solver.

    Attributes:
        noise: noise std divided by the plan's clip norm.
        sampling_rates: one per owner.
        relative_clips: each owner's clip norm divided by the plan's clip norm.
    """

    noise: float
    sampling_rates: np.ndarray
    relative_clips: np.ndarray


class Planner:
    """Solves for noise, batch size or steps, using the last curves as initial guesses.

    Args:
        owners, method, mixture, accountant: as for `ownerwise.plan`.
        release: an additional release that is made at every step, if any.
        reweighted: whether records contribute to the release in inverse proportion to their
            sampling rates, which makes all records count equally; those drawn least often
            contribute in full.
        hardened: whether the plan is hardened, which reserves more of every delta.
    """

    def __init__(
        self,
        owners: Owners,
        method: str,
        mixture: float | None,
        accountant: str,
        release: PaidRelease | None = None,
        reweighted: bool = False,
        hardened: bool = False,
    ):
        self.owners = owners
        self.method = method
        self.mixture = mixture
        self.accountant = accountant
        self.release = release
        self.reweighted = reweighted and release is not None
        # the tiny reserve of other plans is within SAFETY
        self.deltas = owners.delta * (1 - delta_reserve(True)) if hardened else owners.delta
        self.records = owners.records.astype(np.float64)
        self.total = float(self.records.sum())
        self.budgets = Budgets(owners.epsilon * (1 - SAFETY), self.deltas)
        groups = self.budgets.groups  # each has the smallest delta of its owners
        least = [self.budgets.epsilon[group.members].min() for group in groups]
        self.strictest = Budgets(np.array(least), np.array([group.delta for group in groups]))
        self.rate_curves: list[tuple[float, BudgetCurve]] = []  # each with its log noise
        self.last_multipliers: BudgetCurve | None = None
        self.last_noise: float | None = None
        self.reached: Solution

    # -- noise is unknown ----------------------------------------------------------------------

    def find_noise(self, schedule: Schedule, batch_size: float) -> Solution:
        """Return the solution for a given expected batch size."""
        rate = min(1.0, batch_size / self.total)
        ones = np.ones(len(self.owners))
        if self.method == "uniform":
            curve = multiplier_curve(
                self.strictest, rate, schedule, self.accountant, None, self.release
            )
            self._refuse_unreachable(curve)
            return Solution(float(curve(self.strictest).max()), rate * ones, ones)
        if self.method == "scale":
            multipliers = self._multipliers(rate, schedule)
            noise = self.total / float(self.records @ (1.0 / multipliers))  # harmonic mean
            return Solution(noise, rate * ones, noise / multipliers)
        return self._find_noise_for_rates(schedule, batch_size, rate)

    def _find_noise_for_rates(self, schedule: Schedule, batch_size: float, rate: float) -> Solution:
        """Solve `sample` and `both`: find the noise at which the rates add up to the batch size."""
        relative_clips, log_relative = self._relative_clips(rate, schedule)
        rates = np.zeros(0)

        def excess(log_noise: float) -> float:
            nonlocal rates
            rates = self._rates(log_noise, log_relative, schedule)
            return float(np.log(self.records @ rates) - np.log(batch_size)) - _BATCH_TOLERANCE

        if rate > 1 - 4 * _BATCH_TOLERANCE:  # every record takes part in every step
            multipliers = self._multipliers(1.0, schedule)
            noise = float((multipliers * relative_clips).max())
            return Solution(noise, np.full(len(self.owners), rate), relative_clips)
        if self.last_noise is None:
            curve = multiplier_curve(
                self._middle(), rate, schedule, self.accountant, None, self.release, 0.05
            )
            self.last_noise = float(curve(self._middle())[0])
        bounds = (np.log(0.05), np.log(1e6))
        guess = float(np.log(self.last_noise))
        log_noise = find_root(excess, guess, 2.0, *bounds, _BATCH_TOLERANCE, longest_step=0.3)
        self.last_noise = float(np.exp(log_noise))
        self._refuse_unreachable(self.rate_curves[-1][1])
        reached = float(self.records @ rates)
        if not 0 <= np.log(reached / batch_size) <= 2.1 * _BATCH_TOLERANCE:
            raise PlanError(
                "no noise multiplier makes the sampling rates add up to a batch of "
                f"{batch_size:g} (nearest: {reached:g} at noise multiplier {self.last_noise:g}); "
                "change batch_size or steps, or use method='scale'"
            )
        return Solution(self.last_noise, rates * (batch_size / reached), relative_clips)

    def _middle(self) -> Budgets:
        """Return the median budget, weighted by records, for an initial guess."""
        order = np.argsort(self.owners.epsilon, kind="stable")
        weight = np.cumsum(self.records[order])
        at = order[int(np.searchsorted(weight, 0.5 * weight[-1]))]
        return Budgets(self.budgets.epsilon[[at]], self.deltas[[at]])

    def _multipliers(self, rate: float, schedule: Schedule) -> np.ndarray:
        guess = None if self.last_multipliers is None else self.last_multipliers.log_at
        self.last_multipliers = multiplier_curve(
            self.budgets, rate, schedule, self.accountant, guess, self.release
        )
        self._refuse_unreachable(self.last_multipliers)
        return self.last_multipliers(self.budgets)

    def _relative_clips(self, rate: float, schedule: Schedule):
        """Return clip norms divided by their average, and the log of this ratio for any budget."""
        if self.mixture is None:
            return np.ones(len(self.owners)), lambda number, x: np.zeros(np.shape(x))
        clips = self._multipliers(rate, schedule) ** -self.mixture
        average = float(self.records @ clips) / self.total
        curve, mixture = self.last_multipliers, self.mixture
        assert curve is not None

        def log_relative(number: int, log_epsilon: np.ndarray) -> np.ndarray:
            return -mixture * curve.log_at(number, log_epsilon) - np.log(average)

        return clips / average, log_relative

    def _rates(self, log_noise: float, log_relative, schedule: Schedule) -> np.ndarray:
        def log_multiplier(number: int, log_epsilon: np.ndarray) -> np.ndarray:
            return log_noise - log_relative(number, log_epsilon)

        guess = self._rate_guess(log_noise)
        curve = self._rate_curve(self.budgets, log_multiplier, schedule, guess)
        self.rate_curves.append((log_noise, curve))
        return curve(self.budgets)

    def _rate_curve(
        self,
        budgets: Budgets,
        log_multiplier: LogQuantity,
        schedule: Schedule,
        guess: LogQuantity | None = None,
    ) -> BudgetCurve:
        """Return the curve of sampling rates; a reweighted release depends on the lowest one."""
        least_sampling_rate = None
        if self.reweighted:  # owners with the lowest rate pay for the release in full
            strict = self.strictest if self.mixture is None else self.budgets
            full = (log_multiplier, schedule, self.accountant, None, self.release)
            least_sampling_rate = float(sampling_rate_curve(strict, *full)(strict).min())
        return sampling_rate_curve(
            budgets,
            log_multiplier,
            schedule,
            self.accountant,
            guess,
            self.release,
            least_sampling_rate,
        )

    def _rate_guess(self, log_noise: float) -> LogQuantity | None:
        """Return sampling rates extrapolated from the last two noise levels tried."""
        if not self.rate_curves:
            return None
        x1, last = self.rate_curves[-1]
        if len(self.rate_curves) == 1 or self.rate_curves[-2][0] == x1:
            return lambda number, at: last.log_at(number, at) + (log_noise - x1)
        x0, before = self.rate_curves[-2]
        weight = (log_noise - x1) / (x1 - x0)
        return lambda number, at: (
            (1 + weight) * last.log_at(number, at) - weight * before.log_at(number, at)
        )

    # -- batch or steps are unknown ------------------------------------------------------------

    def find_batch(self, schedule: Schedule, noise: float) -> Solution:
        """Return the solution for a given noise, which determines the rates and the batch size."""
        ones = np.ones(len(self.owners))
        log_noise = float(np.log(noise))
        if self.method in ("uniform", "sample"):
            budgets = self.budgets if self.method == "sample" else self.strictest
            curve = self._rate_curve(
                budgets, lambda _, x: np.full(np.shape(x), log_noise), schedule
            )
            self._refuse_unreachable(curve)
            rates = curve(budgets)
            return Solution(noise, rates if self.method == "sample" else rates.min() * ones, ones)

        bounds = (float(np.log(self.total * 1e-7)), float(np.log(self.total)))
        guess = bounds[1] - 4.0
        if self.method == "both":

            def excess(log_batch: float) -> float:
                return log_batch - float(np.log(self._reach(schedule, noise, np.exp(log_batch))))

            find_root(excess, guess, 1.0, *bounds, _BATCH_TOLERANCE)
            return self.reached

        def excess(log_batch: float) -> float:
            needed = self.find_noise(schedule, float(np.exp(log_batch))).noise
            return float(np.log(needed)) - log_noise + 3e-4

        batch_size = float(np.exp(find_root(excess, guess, 1.0, *bounds, 3e-4)))
        solution = self.find_noise(schedule, batch_size)
        return self._with_noise(solution, noise, "a batch of", batch_size)

    def find_steps(self, batch_size: float, noise: float) -> tuple[int, Solution]:
        """Return the number of steps that the budgets allow, and the solution."""
        individual_rates = self.method in ("sample", "both")

        def excess(log_steps: float) -> float:
            schedule = Schedule.constant(max(1, round(float(np.exp(log_steps)))))
            if individual_rates:
                return float(np.log(batch_size / self._reach(schedule, noise, batch_size))) + 2e-4
            return float(np.log(self.find_noise(schedule, batch_size).noise / noise)) + 2e-4

        log_steps = find_root(excess, np.log(1000.0), 0.5, 0.0, np.log(MAX_STEPS), 2e-4)
        steps = max(1, int(np.floor(np.exp(log_steps) + 1e-9)))
        schedule = Schedule.constant(steps)
        if not individual_rates:
            solution = self.find_noise(schedule, batch_size)
            return steps, self._with_noise(solution, noise, "a step count of", steps)
        reach = self._reach(schedule, noise, batch_size)
        if reach < batch_size:
            raise PlanError(
                f"noise_multiplier {noise:g} is too small: in {steps} steps the budgets allow a "
                f"batch of {reach:.4g}, not {batch_size:g}; use more noise, or a smaller batch"
            )
        rates = self.reached.sampling_rates * (batch_size / reach)
        return steps, Solution(noise, rates, self.reached.relative_clips)

    def _reach(self, schedule: Schedule, noise: float, batch_size: float) -> float:
        """Return the batch size that individual rates add up to; store the solution in `reached`.

        `batch_size` only affects the clip norms of `both`.
        """
        rate = min(1.0, batch_size / self.total)
        relative_clips, log_relative = self._relative_clips(rate, schedule)
        rates = self._rates(float(np.log(noise)), log_relative, schedule)
        self._refuse_unreachable(self.rate_curves[-1][1])
        self.reached = Solution(noise, rates, relative_clips)
        return float(self.records @ rates)

    def _with_noise(self, solution: Solution, noise: float, what: str, value: float) -> Solution:
        """Return the solution with its noise raised to `noise`, which must not be smaller."""
        if solution.noise > noise:
            raise PlanError(
                f"noise_multiplier {noise:g} is too small: even {what} {value:.4g} requires at "
                f"least {solution.noise:.4g}; use more noise, or larger budgets"
            )
        return Solution(noise, solution.sampling_rates, solution.relative_clips)

    def _refuse_unreachable(self, curve: BudgetCurve | None) -> None:
        if curve is None or not curve.unreachable:
            return
        problems = []
        other = ". accountant='pld' is tighter" if self.accountant == "rdp" else ""
        for epsilon, delta in curve.unreachable:
            close = np.isclose(self.budgets.epsilon, epsilon, rtol=1e-6)
            who = self.owners.ids[close][:1]
            name = f"owner {who[0]}" if len(who) else "an owner"
            problems.append(
                f"{name}: epsilon {epsilon / (1 - SAFETY):g} at delta {delta:g} is too small for "
                "any sampling rate; use a larger epsilon or delta, fewer steps, a larger batch or "
                f"more noise, or leave out the owner's records{other}"
            )
        raise PlanError(problems)
