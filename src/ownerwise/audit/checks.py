"""Tests of what happened to canaries against what the plan says must happen.

Each test has an exact or nearly exact null distribution, so that the rate of false alarms is
known. The tests use what no attacker has: which canaries were drawn at each step. They therefore
find bugs that hardly change what an attack can reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, ndtr
from scipy.stats import binom, chi2, kstest

from ownerwise.audit.observation import Observations
from ownerwise.audit.rates import auc_and_error

_MOST_VECTORS = 2000
_MOST_NUMBERS = 100_000
_FEWEST = 8


class Check(NamedTuple):
    """One comparison of a run with its plan.

    Attributes:
        name: what is compared.
        group: the group of canaries; "" for all.
        observed, expected: the values compared.
        p: probability of such a deviation, or a larger one, if the run follows the plan.
    """

    name: str
    group: str
    observed: float
    expected: float
    p: float


def checks(seen: Observations) -> list[Check]:
    """Return all comparisons of a run with its plan."""
    found = [*_batch_sizes(seen), *_correlations(seen)]
    for number, name in enumerate(seen.canaries.groups):
        members = seen.canaries.members(number)
        for check in _of_group(seen, members):
            found.append(check._replace(group=name))
    return found


def _of_group(seen: Observations, members: np.ndarray) -> Iterator[Check]:
    included = seen.canaries.included[members]
    inside, outside = members[included], members[~included]
    noise = seen.sums[:, outside] / seen.noise_std[:, None]
    if len(outside) >= 1:
        yield _mean("noise: mean", noise)
        yield _variance("noise: variance", noise)
        yield _shape(noise)
    if len(inside) < 1:
        return
    yield from _draws(seen, inside)
    expected = seen.expected[:, inside]
    if np.isfinite(expected).all():
        residuals = (seen.sums[:, inside] - expected) / seen.noise_std[:, None]
        yield _signal(seen, inside)
        yield _variance("signal: variance around the plan's", residuals)
        retired = seen.canaries.paid[:, inside] == 0
        if retired.any():
            yield _mean("what canaries add after they have retired", residuals[retired])
    else:
        yield _largest_signal(seen, inside)
    if min(len(inside), len(outside)) >= _FEWEST and _predictable(seen):
        yield from _scores(seen, inside, outside)


def _mean(name: str, values: np.ndarray) -> Check:
    total = float(values.sum() / math.sqrt(values.size))
    return Check(name, "", float(values.mean()), 0.0, two_sided(total))


def _variance(name: str, values: np.ndarray) -> Check:
    total, count = float((values**2).sum()), values.size
    return Check(name, "", total / count, 1.0, _chi2(total, count))


def _chi2(total: float, freedom: float) -> float:
    return min(1.0, 2 * float(min(chi2.sf(total, freedom), chi2.cdf(total, freedom))))


def _shape(noise: np.ndarray) -> Check:
    """Compare the distribution of the noise with a normal distribution."""
    flat = noise.ravel()
    if len(flat) > _MOST_NUMBERS:
        flat = flat[:: -(-len(flat) // _MOST_NUMBERS)]
    result = kstest(flat, ndtr)
    distance, p = float(result.statistic), float(result.pvalue)  # pyright: ignore
    return Check("noise: distance from normal", "", distance, 0.0, p)


def _rows(seen: Observations) -> np.ndarray:
    """Return how many rows of each canary are drawn independently, if it is included."""
    canaries = seen.canaries
    of_owners = canaries.plan.sampling == "owner"
    return np.ones(len(canaries), dtype=np.int64) if of_owners else canaries.rows


def _draws(seen: Observations, inside: np.ndarray) -> Iterator[Check]:
    """Compare the draws of included canaries with independent draws at their sampling rate."""
    drawn, rows = seen.drawn[:, inside], int(_rows(seen)[inside[0]])
    rate = float(seen.canaries.plan.sampling_rates[seen.canaries.owner[inside[0]]])
    yield _share("sampling rate", int(drawn.sum()), rows * drawn.size, rate)
    trials = rows * len(drawn)
    of_each = np.full(trials, rate)
    yield _count_variance("draws of each canary: variance", drawn.sum(axis=0), of_each)
    if rows == 1:  # whoever was drawn is drawn again with the same probability
        again = int((drawn[1:] * drawn[:-1]).sum())
        yield _share("draws in consecutive steps", again, int(drawn[:-1].sum()), rate)


def _batch_sizes(seen: Observations) -> Iterator[Check]:
    """Check that batches of included canaries vary as much as those of independent draws."""
    canaries = seen.canaries
    rates = np.repeat(canaries.plan.sampling_rates[canaries.owner], _rows(seen) * canaries.included)
    yield _count_variance("draws of each step: variance", seen.drawn.sum(axis=1), rates)


def _share(name: str, count: int, trials: int, rate: float) -> Check:
    """Compare a count with its binomial distribution."""
    tails = binom.cdf(count, trials, rate), binom.sf(count - 1, trials, rate)
    p = min(1.0, 2 * float(min(tails)))
    return Check(name, "", count / max(1, trials), rate, p)


def _count_variance(name: str, counts: np.ndarray, rates: np.ndarray) -> Check:
    """Compare the variance of counts of independent draws at `rates`.

    Counts are whole numbers, so each tail is computed from the least extreme values that round to
    them.
    """
    spreads = rates * (1 - rates)
    variance, fourth = float(spreads.sum()), float((spreads * (1 - 6 * spreads)).sum())
    distance = np.abs(counts - rates.sum())
    observed = float((distance**2).mean())
    if variance == 0:
        return Check(name, "", observed, 0.0, float(observed == 0))
    freedom = 2 * len(counts) / (2 + fourth / variance**2)  # same mean and variance as the total
    most = float(((distance + 0.5) ** 2).mean()) / variance
    least = float((np.maximum(distance - 0.5, 0) ** 2).mean()) / variance
    tails = chi2.cdf(most * freedom, freedom), chi2.sf(least * freedom, freedom)
    return Check(name, "", observed, variance, min(1.0, 2 * float(min(tails))))


def _signal(seen: Observations, inside: np.ndarray) -> Check:
    """Compare what drawn canaries add with what the plan says they add."""
    precision = 1 / seen.noise_std[:, None]
    expected = seen.expected[:, inside] * precision
    sums = seen.sums[:, inside] * precision
    power = float((expected**2).sum())
    if power == 0:
        return Check("signal, as a multiple of the plan's", "", 1.0, 1.0, 1.0)
    ratio = float((sums * expected).sum()) / power
    return Check(
        "signal, as a multiple of the plan's", "", ratio, 1.0,
        two_sided((ratio - 1) * math.sqrt(power)),
    )  # fmt: skip


def _largest_signal(seen: Observations, inside: np.ndarray) -> Check:
    """Check that drawn canaries add at most their clip norm, if their weights are unknown."""
    most = seen.drawn[:, inside] * seen.canaries.clip_norm[inside] / seen.noise_std[:, None]
    sums = seen.sums[:, inside] / seen.noise_std[:, None]
    power = float((most**2).sum())
    if power == 0:
        return Check("signal, as a multiple of the clip norm", "", 0.0, 1.0, 1.0)
    ratio = float((sums * most).sum()) / power
    excess = (ratio - 1) * math.sqrt(power)
    return Check("signal, as a multiple of the clip norm", "", ratio, 1.0, float(ndtr(-excess)))


def _predictable(seen: Observations) -> bool:
    """Return whether every drawn canary adds its whole clip norm, so that scores are known."""
    canaries = seen.canaries
    full = seen.drawn * canaries.clip_norm
    return bool(np.isfinite(seen.expected).all()) and np.allclose(seen.expected, full, rtol=0.02)


def _scores(seen: Observations, inside: np.ndarray, outside: np.ndarray) -> Iterator[Check]:
    """Compare the scores with the distribution that follows from the plan alone."""
    canaries, plan = seen.canaries, seen.canaries.plan
    owner = canaries.owner[inside[0]]
    rate = float(plan.sampling_rates[owner])
    rows = 1 if plan.sampling == "owner" else int(canaries.rows[inside[0]])
    weights = (seen.noise_std.min() / seen.noise_std) ** 2
    drawn = max(1, int(seen.drawn[:, inside].sum()))
    clip = float(seen.expected[:, inside].sum()) / drawn
    mean = rows * rate * clip * float(weights.sum())
    of_noise = float((weights**2) @ seen.noise_std**2)
    spread = rate * (1 - rate)
    of_draws = rows * spread * clip**2 * float((weights**2).sum())
    fourth = rows * spread * (1 - 6 * spread) * clip**4 * float((weights**4).sum())
    variance = of_noise + of_draws
    scores = seen.scores
    gap = float(scores[inside].mean()) - mean
    yield Check(
        "score of included canaries: mean", "", float(scores[inside].mean()), mean,
        two_sided(gap / math.sqrt(variance / len(inside))),
    )  # fmt: skip
    yield _score_variance("included", scores[inside] - mean, variance, fourth)
    yield _score_variance("left-out", scores[outside], of_noise, 0.0)
    value, error = auc_and_error(scores[inside], scores[outside])
    predicted = _predicted_auc(rate, rows, clip, weights, of_noise)
    yield Check("score: AUC", "", value, predicted, two_sided((value - predicted) / error))


def _score_variance(which: str, centred: np.ndarray, variance: float, fourth: float) -> Check:
    """Compare a variance; `fourth` is the fourth cumulant of the scores."""
    count, total = len(centred), float((centred**2).sum()) / variance
    freedom = 2 * count / (2 + fourth / variance**2)  # same mean and variance as the total
    p = _chi2(total * freedom / count, freedom)
    return Check(f"score of {which} canaries: variance", "", total * variance / count, variance, p)


def _predicted_auc(
    rate: float, rows: int, clip: float, weights: np.ndarray, of_noise: float
) -> float:
    """Return the AUC that the plan predicts for the scores."""
    steps = len(weights)
    if np.ptp(weights) == 0:
        counts = np.arange(rows * steps + 1)
        likely = binom.pmf(counts, rows * steps, rate)
        return float(likely @ ndtr(counts * clip * weights[0] / math.sqrt(2 * of_noise)))
    mean = rows * rate * clip * weights.sum()
    spread = rows * rate * (1 - rate) * clip**2 * (weights**2).sum() + 2 * of_noise
    return float(ndtr(mean / math.sqrt(spread)))


def _correlations(seen: Observations) -> Iterator[Check]:
    """Check that the noise of different steps, and of different directions, is independent."""
    outside = np.flatnonzero(~seen.canaries.included)
    noise = seen.sums[:, outside] / seen.noise_std[:, None]
    steps, count = noise.shape
    if steps > 1:
        neighbours = float((noise[1:] * noise[:-1]).sum()) / math.sqrt((steps - 1) * count)
        name = "noise: correlation of consecutive steps"
        value = neighbours / math.sqrt((steps - 1) * count)
        yield Check(name, "", value, 0.0, two_sided(neighbours))
        yield _largest_cosine("noise: largest correlation of two steps", noise)
    if count > 1 and steps >= _FEWEST:
        yield _largest_cosine("noise: largest correlation of two directions", noise.T)


def _largest_cosine(name: str, vectors: np.ndarray) -> Check:
    """Test the largest |cosine| of any two vectors; for independent normal vectors it is known."""
    vectors = vectors[:_MOST_VECTORS]
    count, size = vectors.shape
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths > 0, lengths, 1.0)  # without noise, all are 0
    gram = np.abs(units @ units.T)
    np.fill_diagonal(gram, 0.0)
    largest = float(min(1.0, gram.max()))
    if size < 2:
        return Check(name, "", largest, 0.0, 1.0)
    # the squared cosine has a Beta(1/2, (size - 1)/2) distribution
    tail = float(betainc((size - 1) / 2, 0.5, 1 - largest**2))
    return Check(name, "", largest, 0.0, min(1.0, tail * count * (count - 1) / 2))


def two_sided(z: float) -> float:
    """Return the probability that a standard normal variate is at least as far from 0."""
    return 2 * float(ndtr(-abs(z)))
