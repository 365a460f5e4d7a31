"""The pair for all records of an owner: one step's output with and without all of them.

An owner has K records, each of which is drawn with probability q. If i of them are drawn, they
change the step's sum by at most i times the contribution of one record. In units of one record's
contribution, the output is Q = N(0, m^2) without the owner, and P, the mixture of the N(i, m^2) for
i ~ Binomial(K, q), with the owner. This pair dominates every pair of data sets that differ in the
owner's records, in both directions (docs/proofs/owners.md). It is not symmetric.

Mass of the binomial distribution is only ever moved to a LARGER number of records, which can only
overstate the cost. For privacy loss distributions, the upper tail is moved to infinity: its
probability is deducted from delta. For Renyi divergences, it is moved to coarser levels up to K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from ownerwise.accounting.moments import LEAST_MULTIPLIER, MAX_SHIFT, TAIL, moments_of
from ownerwise.errors import AccountingError

_LEVELS = 1000  # if more records than this are drawn on average, their number is rounded up
_COARSE = 1.05  # ratio of the levels in the upper tail
_NEGLIGIBLE = 1e-20  # probability of the tail that is moved to coarser levels
_MOST_NODES = 100_000  # of the integrals, on either side
_AT_ONCE = 2_000_000  # numbers in a temporary array


def most_drawn(sampling_rate: float, records: int, tail: float) -> int:
    """Return a number of drawn records that is exceeded with probability at most `tail`."""
    low, high = -1, records  # binom.isf is not precise for small tails
    while high - low > 1:
        middle = (low + high) // 2
        if binom.sf(middle, records, sampling_rate) <= tail:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, eq=False)
class OwnerPair:
    """N(0, m^2) and the mixture of N(i, m^2) with masses b_i, for the levels i.

    Attributes:
        multiplier: m, the std of the noise divided by the contribution of one record.
        shifts: the levels i, rising, [levels].
        log_masses: log b_i; the masses add up to at most 1.
    """

    multiplier: float
    shifts: np.ndarray
    log_masses: np.ndarray

    @classmethod
    def cut(cls, multiplier: float, sampling_rate: float, records: int, most: int) -> OwnerPair:
        """Return the pair without the cases in which more than `most` records are drawn."""
        drawn = np.arange(most + 1)
        mass = binom.pmf(drawn, records, sampling_rate)
        coarse = 1 + int(records * sampling_rate) // _LEVELS
        mass = np.bincount(-(-drawn // coarse), mass)
        at = np.flatnonzero(mass)
        return cls(multiplier, (coarse * at).astype(float), np.log(mass[at]))

    @classmethod
    def whole(cls, multiplier: float, sampling_rate: float, records: int) -> OwnerPair:
        """Return the pair with all cases; the masses of coarse levels are rounded up."""
        most = most_drawn(sampling_rate, records, _NEGLIGIBLE)
        pair = cls.cut(multiplier, sampling_rate, records, most)
        if most == records:
            return pair
        ends = [most]
        while ends[-1] < records:
            ends.append(min(records, max(ends[-1] + 1, int(_COARSE * ends[-1]))))
        # Chernoff: P(more than e are drawn) <= exp(-K KL(x, q)) with x = (e + 1) / K
        share = (np.array(ends[:-1]) + 1.0) / records
        rest = 1.0 - share
        with np.errstate(divide="ignore", invalid="ignore"):
            remaining = np.where(rest > 0, rest * np.log(rest / (1.0 - sampling_rate)), 0.0)
        log_tail = -records * (share * np.log(share / sampling_rate) + remaining)
        shifts = np.append(pair.shifts, np.array(ends[1:], dtype=float))
        return cls(multiplier, shifts, np.append(pair.log_masses, log_tail))

    def times(self, factor: float) -> OwnerPair:
        """Return the pair with all noise multiplied by `factor`."""
        return OwnerPair(self.multiplier * factor, self.shifts, self.log_masses)

    def highest_order(self, sampling_rate: float) -> float:
        """Return the largest order worth evaluating.

        The moments explode where the case of i drawn records dominates, at about
        2 m^2 log(1 / b_i) / i^2; a margin of 50% is added.
        """
        m = self.multiplier
        if m < LEAST_MULTIPLIER:
            raise AccountingError(
                f"noise multiplier {m:g}: expected at least {LEAST_MULTIPLIER:g}; with less noise "
                "there is almost no privacy, and the loss cannot be tabulated"
            )
        drawn = self.shifts > 0
        explosion = 3.0 * m**2 * np.min(-self.log_masses[drawn] / self.shifts[drawn] ** 2)
        order_per_deviation = m / self.shifts[-1]  # how far the integrals reach, see `log_moments`
        wanted = max(8.0, min(MAX_SHIFT * order_per_deviation, 10.0 + explosion))
        return float(min(wanted, _MOST_NODES * self._step * order_per_deviation))

    @property
    def _step(self) -> float:
        return min(0.5, self.multiplier / 4.0)

    def log_moments(self, sampling_rate: float, orders: np.ndarray) -> np.ndarray:
        """Return log E_Q[(P/Q)^a] for every order a, by the trapezoidal rule.

        The density ratio is a polynomial in exp(u / m) whose roots are real and negative: a
        binomial polynomial has such roots, and exp(-i^2 / (2 m^2)) is a multiplier sequence, which
        preserves them (Laguerre). So the nearest singularity is pi*m off the axis, as for a record.
        """
        orders = np.asarray(orders, dtype=np.float64)
        log_root, step = 0.5 * math.log(2 * math.pi), self._step
        low, high = self._range(orders)
        u = np.arange(low, high + step, step)  # standard deviations of Q
        log_weight = -0.5 * u**2 - log_root + math.log(step)
        parts = [self._ratio(some) for some in self._pieces(u)]
        log_ratio, gain = (np.concatenate(part) for part in zip(*parts, strict=True))
        result = np.empty_like(orders)
        size = 1 + np.ceil(0.25 * np.log2(np.maximum(np.abs(orders), 1.0)))
        classes = np.copysign(size, orders)
        for number in np.unique(classes):  # low orders need only a small part of the range
            some = classes == number
            first, last = np.searchsorted(u, self._range(orders[some]))
            at = slice(max(first - 1, 0), last + 1)
            result[some] = moments_of(log_ratio[at], gain[at], log_weight[at], orders[some])
        return result

    def _range(self, orders: np.ndarray) -> tuple[float, float]:
        """Return the bounds of the integrals for these orders, in standard deviations of Q."""
        m = self.multiplier
        farthest = self.shifts[-1] / m
        upper = max(1.0, float(orders.max())) * farthest
        lower = min(0.0, float(orders.min())) * farthest
        if self.shifts[0] == 0:  # further down, the ratio hardly changes
            lower = max(lower, -m * (40.0 + max(0.0, self.log_masses[1] - self.log_masses[0])))
        return lower - TAIL, upper + TAIL

    def above(
        self, width: float, reach: float, most: int, *, removing: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return cells of a step's loss, and the probabilities that the loss lies above each.

        The loss is log(P/Q) if the owner is removed, and log(Q/P) if they are added. The cells
        cover all losses within `reach` standard deviations, but at most `most` cells on either side
        of 0: a larger loss in a single step counts as infinite, and a smaller one is rounded up.

        Returns:
            Cell numbers, the probabilities under the first distribution (P if the owner is removed,
            else Q), and those under the second.
        """
        m, sign = self.multiplier, 1 if removing else -1
        u = np.linspace(-reach, reach + self.shifts[-1] / m, 1024)
        losses = sign * self._ratio(u)[0]
        low = max(int(np.floor(losses.min() / width)), -most)
        high = min(int(np.ceil(losses.max() / width)), most)
        cells = np.arange(low, max(high, low + 1) + 1)
        crossing = self._crossing(sign * width * cells, u)  # sign * u > sign * crossing is above
        masses = np.exp(self.log_masses)
        mixed = np.zeros(len(cells))
        for shift, mass in zip(self.shifts, masses, strict=True):
            mixed += mass * ndtr(sign * (shift / m - crossing))
        base = ndtr(-sign * crossing)
        return (cells, mixed, base) if removing else (cells, base, mixed)

    def _crossing(self, log_ratio: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Return the u at which log(P/Q) takes the given values, -inf if it is always larger.

        Newton's method for log(P/Q - b_0), which is convex with slopes from 1/m to i/m.
        """
        drawn = self.shifts > 0
        missing = np.exp(self.log_masses[~drawn]).sum()
        # log(exp(value) - b_0), precise if b_0 is close to 1 and the value close to 0
        if missing:
            undrawn = -math.expm1(float(self.log_masses[0]))  # 1 - b_0
            argument = np.expm1(np.minimum(log_ratio, 700.0)) + undrawn
            with np.errstate(divide="ignore", invalid="ignore"):
                wanted = np.where(argument > 0, np.log(argument), -np.inf)
        else:
            wanted = log_ratio
        result = np.full(len(wanted), -np.inf)
        solvable = np.flatnonzero(wanted > -np.inf)
        shifts, log_masses = self.shifts[drawn] / self.multiplier, self.log_masses[drawn]
        level = log_masses - 0.5 * shifts**2
        known = _log_total(level[:, None] + shifts[:, None] * table)
        for at in self._pieces(solvable):
            target = wanted[at]
            u = np.interp(target, known, table)
            for _ in range(100):
                exponents = level[:, None] + shifts[:, None] * u
                top = exponents.max(axis=0)
                weights = np.exp(exponents - top)
                total = weights.sum(axis=0)
                change = (top + np.log(total) - target) * total / (shifts @ weights)
                u = u - change
                if np.abs(change).max() < 1e-11 * (1.0 + np.abs(u).max()):
                    break
            else:
                raise AccountingError(
                    f"the privacy loss of an owner with noise multiplier {self.multiplier:g} "
                    "cannot be tabulated; use a larger noise multiplier"
                )
            result[at] = u
        return result

    def _ratio(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log(P/Q) at u standard deviations of Q, and P/Q - 1 without its mean under Q."""
        shifts = self.shifts[:, None] / self.multiplier
        tilts = shifts * u - 0.5 * shifts**2  # log density ratios N(i, m^2) / N(0, m^2)
        masses = np.exp(self.log_masses)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            gain = masses @ np.expm1(np.minimum(tilts, 700.0))
            small = np.log1p(gain - max(0.0, 1.0 - masses.sum()))
        log_ratio = _log_total(self.log_masses[:, None] + tilts)
        return np.where(np.abs(log_ratio) < 0.1, small, log_ratio), gain

    def _pieces(self, values: np.ndarray) -> list[np.ndarray]:
        return np.array_split(values, 1 + len(values) * len(self.shifts) // _AT_ONCE)


def _log_total(exponents: np.ndarray) -> np.ndarray:
    """Return log(sum(exp(exponents))) over the first axis; scipy's logsumexp is far slower."""
    top = exponents.max(axis=0)
    return top + np.log(np.exp(exponents - top).sum(axis=0))
