"""Lower bounds on epsilon from one run: from how many canaries an attacker guesses correctly.

The attacker ranks the canaries of a group by their scores, guesses "in" for the highest and "out"
for the lowest, and abstains for the rest. How many guesses to make is fixed beforehand. If the run
were more private than it is, so many correct guesses would be unlikely: the bound is the largest
epsilon that the number of correct guesses rejects.

- `theorem`: Steinke, Nasr, Jagielski (2023), "Privacy Auditing with One (1) Training Run",
  Theorem 3.1; it holds for every (epsilon, delta)-differentially private run.
- `by_curve`: Mahloujifar, Melis, Chaudhuri (2024), "Auditing f-Differential Privacy in One Run",
  Algorithm 3; it holds for every run with the given trade-off curve, and is tighter.
- `gaussian_estimate`: a fit of two normal distributions, which is an estimate and not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import binom

from ownerwise.audit.rates import Measured
from ownerwise.audit.trade_off import TradeOff

GUESSES = 0.1
"""Fraction of the canaries for which the attacker guesses."""

_LARGEST_EPSILON = 50.0
_BISECTIONS = 40
_HALVINGS = 8
_NOISES = (0.25, 1.0, 64.0)  # the least, that of the plan, and the most


class Guesses(NamedTuple):
    """The guesses of an attacker.

    Attributes:
        canaries: number of canaries, each included with probability 1/2.
        made: number of guesses.
        right: number of correct guesses.
    """

    canaries: int
    made: int
    right: int


def guess(scores: np.ndarray, included: np.ndarray, share: float = GUESSES) -> Guesses:
    """Return how the attacker does who ranks canaries by their scores."""
    each = max(1, min(round(share * len(scores) / 2), len(scores) // 2))
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-each:]].sum() + (~included[order[:each]]).sum())
    return Guesses(len(scores), 2 * each, right)


def chance(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Bound the probability of so many correct guesses if the run is (epsilon, delta)-private."""
    count, made, right = guesses
    probability = 1 / (1 + math.exp(-epsilon))
    beyond = float(binom.sf(right - 1, made, probability))
    fewer = np.arange(1, right + 1)
    gains = (binom.sf(right - fewer - 1, made, probability) - beyond) / fewer
    largest = float(gains.max()) if right else 0.0
    return min(1.0, beyond + 2 * count * delta * largest)


def theorem(guesses: Guesses, delta: float, failure: float) -> float:
    """Return a lower bound on epsilon at `delta` that is wrong with probability `failure`."""
    return _largest(lambda epsilon: chance(guesses, epsilon, delta) <= failure)


def consistent(guesses: Guesses, curve: TradeOff, failure: float) -> bool:
    """Return False if so many correct guesses have a probability below `failure` under a curve.

    The probabilities of i or more correct guesses obey a recursion from i = right down to 0. If it
    arrives at more than the certain event, the run does not have this curve.
    """
    count, made, right = guesses
    share = made / count
    detected = failure * share * right / made
    missed = failure * share * (made - right) / made
    for number in range(right - 1, -1, -1):
        least = max(missed, curve.false_alarms(detected))
        detected += number / (made - number) * (least - missed)
        missed = least
        if detected + missed > share:
            return False
    return True


def by_curve(
    guesses: Guesses, curve_at: Callable[[float], TradeOff], delta: float, failure: float
) -> float:
    """Return a lower bound on epsilon at `delta`, for runs whose curve is one of a family.

    Args:
        guesses: the attacker's guesses.
        curve_at: the run's curve if all noise is multiplied by a factor.
        delta: the delta at which to state epsilon.
        failure: the probability that the bound is wrong.
    """
    least, one, most = _NOISES
    if consistent(guesses, curve_at(most), failure):
        return 0.0
    if consistent(guesses, curve_at(one), failure):
        kept, rejected = one, most  # noise factors
    elif consistent(guesses, curve_at(least), failure):
        kept, rejected = least, one
    else:
        return min(_LARGEST_EPSILON, curve_at(least).epsilon(delta))
    for _ in range(_HALVINGS):
        middle = math.sqrt(kept * rejected)
        if consistent(guesses, curve_at(middle), failure):
            kept = middle
        else:
            rejected = middle
    return min(_LARGEST_EPSILON, curve_at(rejected).epsilon(delta))


def gaussian_estimate(
    scores: np.ndarray, included: np.ndarray, delta: float, failure: float
) -> Measured:
    """Estimate epsilon as if the scores were normal with the same variance in and out."""
    inside, outside = scores[included], scores[~included]
    if min(len(inside), len(outside)) < 2:
        return Measured(0.0, 0.0, _LARGEST_EPSILON)
    spread = math.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2)
    if not spread > 0:  # scores that do not vary say nothing
        return Measured(0.0, 0.0, _LARGEST_EPSILON)
    gap = float(inside.mean() - outside.mean()) / spread
    error = math.sqrt(1 / len(inside) + 1 / len(outside) + gap**2 / (2 * len(scores)))
    reach = -float(ndtri(failure / 2)) * error
    return Measured(*(_of_shift(shift, delta) for shift in (gap, gap - reach, gap + reach)))


def _of_shift(shift: float, delta: float) -> float:
    """Return the epsilon of N(shift, 1) against N(0, 1)."""
    if shift <= 0:
        return 0.0

    def enough(epsilon: float) -> bool:
        second = math.exp(epsilon + float(log_ndtr(-epsilon / shift - shift / 2)))
        return float(ndtr(-epsilon / shift + shift / 2)) - second > delta

    return _largest(enough)


def _largest(holds: Callable[[float], bool]) -> float:
    """Return the largest epsilon at which `holds`, which holds up to some epsilon; 0 if none."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
