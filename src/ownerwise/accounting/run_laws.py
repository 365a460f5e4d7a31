"""Laws for the secret, random number of runs of which only the best is released.

Guarantee (Papernot and Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy").
Let one run satisfy (a, r(a))-Renyi differential privacy at every order a, let the number of runs K
follow a law below, independently of the data, and let only the run with the best score be released,
where the score is part of what a run outputs. The result then satisfies, at every order a > 1,

- truncated negative binomial with shape eta (Theorem 2), for every b > 1:
  r(a) + (1 + eta) ((1 - 1/b) r(b) + ln(1/g) / b) + ln E[K] / (a - 1);
- Poisson (Theorem 6), for every e <= ln(1 + 1/(a - 1)) at which one run is (e, d)-differentially
  private: r(a) + E[K] d + ln E[K] / (a - 1).

The number of runs must stay secret; the law and its mean are public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq
from scipy.stats import poisson

from ownerwise.accounting import rdp
from ownerwise.accounting.dominating_pairs import GaussianPair
from ownerwise.accounting.rdp import convert
from ownerwise.errors import AccountingError, known_names

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""The shape of each law: eta of the truncated negative binomial law; infinite for Poisson."""

LARGEST_MEAN = 1000.0
_LONGEST = 10**6
_SPACING = 1.02  # of the orders minus one


@dataclass(frozen=True)
class RunLaw:
    """The law of the number of runs.

    Attributes:
        name: "logarithmic", "geometric" or "poisson".
        mean: the expected number of runs, from above 1 to 1000; 1 is allowed for Poisson.
    """

    name: str
    mean: float

    def __post_init__(self):
        if problems := law_problems(self.name, self.mean):
            raise AccountingError(problems)

    @property
    def shape(self) -> float:
        """The law's shape, as in dp-accounting's `RepeatAndSelectDpEvent`."""
        return SHAPES[self.name]

    @cached_property
    def gamma(self) -> float:
        """The parameter g of a truncated negative binomial law; for geometric, 1 / mean."""
        if self.name == "geometric":
            return 1.0 / self.mean
        # E[K] = (1/g - 1) / ln(1/g); rounded down, which overstates the cost
        root = brentq(lambda x: math.expm1(x) / x - self.mean, 1e-12, 50.0, xtol=1e-14)
        return math.exp(-float(root)) * (1 - 1e-12)  # pyright: ignore[reportArgumentType]

    def probabilities(self, most: int) -> np.ndarray:
        """Return the probabilities of 0, 1, ..., `most` runs."""
        counts = np.arange(most + 1, dtype=np.float64)
        if self.name == "poisson":
            return poisson.pmf(counts, self.mean)
        with np.errstate(divide="ignore"):
            log_decay = counts * math.log1p(-self.gamma)
            if self.name == "geometric":
                log_mass = log_decay + math.log(self.gamma / (1 - self.gamma))
            else:
                log_mass = log_decay - np.log(counts) - math.log(-math.log(self.gamma))
        mass = np.exp(log_mass)
        mass[0] = 0.0
        return mass

    def most(self, probability: float) -> int:
        """Return a number that K exceeds with at most this probability."""
        if self.name == "poisson":
            return int(poisson.isf(probability, self.mean)) + 1
        if self.name == "geometric":
            return max(1, math.ceil(math.log(probability) / math.log1p(-self.gamma)))
        # sum over k > n of (1-g)^k / (k ln(1/g)) <= (1-g)^(n+1) / ((n+1) g ln(1/g))
        scale = math.log(probability * self.gamma * -math.log(self.gamma))
        for count in range(1, _LONGEST):
            if (count + 1) * math.log1p(-self.gamma) - math.log(count + 1) <= scale:
                return count
        raise AccountingError(f"{self.name} law with mean {self.mean:g}: the tail is too long")

    def number(self, uniform: float) -> int:
        """Return the number of runs for a multiple of 2^-53 that is uniform on [0, 1).

        The law is met to within 2^-52, in total variation.
        """
        last = self.most(2.0**-53)
        cumulative = np.cumsum(self.probabilities(last))
        return min(int(np.searchsorted(cumulative, uniform, side="right")), last)

    def renyi(self, orders: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Return the Renyi divergences of the best of K runs, given those of one run.

        Args:
            orders: orders above 1, ascending.
            base: the Renyi divergence of one run at each order, the larger of both directions.
        """
        if not (np.isfinite(base).all() and (base >= 0).all() and (orders > 1).all()):
            raise AccountingError(
                "the Renyi divergences of one run are not all finite and at least 0, at orders "
                "above 1; expected that. Use more noise"
            )
        known = base + math.log(self.mean) / (orders - 1)
        if self.name == "poisson":
            return known + self.mean * _deltas(orders, base, np.log1p(1.0 / (orders - 1)))
        second = (1 - 1 / orders) * base + math.log(1 / self.gamma) / orders
        return known + (1 + self.shape) * float(second.min())

    def epsilon(self, orders: np.ndarray, base: np.ndarray, delta: float) -> float:
        """Return epsilon of the best of K runs at `delta`."""
        excess = orders - 1
        return max(0.0, float(convert(self.renyi(orders, base) * excess, excess, delta).min()))

    def epsilon_of(self, runs: Sequence[Sequence[rdp.Segment]], delta: float) -> float:
        """Return epsilon of the best of K runs, each of which draws its settings by a public law.

        One run then costs at most the largest divergence of any settings, at each order.

        Args:
            runs: the parts of a run for each of the settings; see `RunCost.segments`.
            delta: the delta.
        """
        runs = [parts for parts in runs if parts]
        if not runs:
            return 0.0
        excess = rdp.order_grid(min(map(rdp.highest_order, runs)), _SPACING)
        sums = [rdp.log_moment_sums(parts, excess) for parts in runs]
        return self.epsilon(1 + excess, np.max(sums, axis=0) / excess, delta)


def law_problems(name: object, mean: object) -> list[str]:
    """Return the problems with the name of a law and an expected number of runs."""
    problems = []
    if name not in SHAPES:
        problems.append(f"law is {name!r}; {known_names(name, SHAPES)}")
    is_number = isinstance(mean, int | float | np.number) and not isinstance(mean, bool)
    least = 1.0 if name == "poisson" else 1.0 + 1e-6
    if not (is_number and least <= mean <= LARGEST_MEAN):  # pyright: ignore[reportOperatorIssue]
        problems.append(
            f"runs is {mean!r}; expected the expected number of runs, above 1 and at most "
            f"{LARGEST_MEAN:g}"
        )
    return problems


def _deltas(orders: np.ndarray, base: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Return a delta of one run at each epsilon: the inverse of `rdp.convert`."""
    excess = orders - 1
    log_delta = excess * (base - epsilons[:, None] + np.log1p(-1 / orders)) - np.log(orders)
    return np.exp(np.minimum(log_delta.min(axis=1), 0.0))


def score_segment(multiplier: float) -> rdp.Segment:
    """Return the part of a run that releases its score with Gaussian noise, without sampling."""
    return rdp.Segment(1, 1.0, GaussianPair(multiplier))
