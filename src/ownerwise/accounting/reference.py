"""An independent check of every plan with dp-accounting, the field's reference accountant.

It shares no numerical code with the accountants used for planning: discretisation, composition and
conversion are dp-accounting's own. Plans made with either accountant are checked against its
privacy loss distributions. Plans made with RDP stay below their targets by a wide margin.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from ownerwise.accounting.gaussian import gaussian_mu
from ownerwise.accounting.run_cost import Exposure, RunCost
from ownerwise.accounting.run_laws import RunLaw
from ownerwise.errors import AccountingError

OVERSTATEMENT = 2e-4
"""Intended relative overstatement of epsilon by the reference's grid; plans leave room for it."""


OWNER_OVERSTATEMENT = 1e-3
"""The same for all records of an owner together."""

_WIDEST = 5e-3
_WIDEST_OF_OWNERS = 5e-2
_SMOOTH_STEPS = 20  # the loss over fewer steps is less smooth; they get the grid of so many

_ORDERS = [1 + 1.04**power for power in range(-30, 62)] + [
    round(12 * 1.04**power) for power in range(115)
]
"""Orders for private tuning; above the first part, whole numbers are quicker."""

_LEFT_OUT = 1e-5  # fraction of delta for numbers of drawn records that are left out


def name() -> str:
    """Return the name and version of the reference."""
    return f"dp-accounting {version('dp-accounting')} PLD"


def epsilon(
    run: RunCost, exposure: Exposure, delta: float, target: float, records: int = 1
) -> float:
    """Return epsilon according to dp-accounting; `target` only sets the resolution of its grid.

    With `records` above 1, the epsilon is that of so many records of an owner together, for runs
    without a release with Laplace noise.
    """
    composed, lost = distribution(run, exposure, delta, target, records)
    result = 0.0
    if composed is not None:
        rest = delta - lost * np.exp(target) if lost else delta
        result = float(composed.get_epsilon_for_delta(rest))
    if not (np.isfinite(result) and result >= 0):
        raise AccountingError(
            f"the reference accountant returned {result} for sampling rate "
            f"{exposure.sampling_rate:g}, noise multiplier {exposure.multiplier:g}, "
            f"{run.schedule.steps} steps, delta {delta:g}"
        )
    return result


def distribution(
    run: RunCost, exposure: Exposure, delta: float, target: float, records: int = 1
) -> tuple[Any, float]:
    """Return dp-accounting's privacy loss distribution, and a probability that it leaves out.

    At every epsilon up to `target`, the left-out probability p adds at most p exp(epsilon) to
    delta. The distribution is None if nothing is released. The arguments are those of `epsilon`;
    `delta` and `target` only set the resolution.
    """
    from dp_accounting.pld import privacy_loss_distribution

    segments = [segment for segment in run.schedule.segments if segment[0]]
    if exposure.sampling_rate == 0.0:
        segments = []
    closes = run.closing is not None and exposure.closing > 0
    opens = run.opening is not None
    steps = sum(count for count, _ in segments) + closes + opens
    if steps == 0:
        return None, 0.0
    # A grid of width w adds about T w^2 order / 12 to epsilon (see pld.py), where the order is
    # the one that determines delta for a Gaussian with the same budget.
    order = 1.5 + target / gaussian_mu(target, delta) ** 2
    if records == 1:
        width = min(_WIDEST, np.sqrt(12.0 * OVERSTATEMENT * target / (steps * order)))
    else:  # a mixture takes long to tabulate: no finer than needed
        smooth = max(steps, _SMOOTH_STEPS)
        width = np.sqrt(12.0 * OWNER_OVERSTATEMENT * target / (smooth * order))
        width = min(_WIDEST_OF_OWNERS, width)
    log_cut = float(min(-50.0, np.log(delta / steps) - 12.0))
    rate, multiplier, scale = exposure.sampling_rate, exposure.multiplier, 0.0
    if run.release is not None and run.release.noise == "laplace":
        scale = run.release.std / (np.sqrt(2.0) * exposure.release)
    elif run.release is not None:
        multiplier = (multiplier**-2.0 + (exposure.release / run.release.std) ** 2) ** -0.5

    def gaussian(multiplier: float, sampling_rate: float):
        return privacy_loss_distribution.from_gaussian_mechanism(
            multiplier,
            sampling_prob=sampling_rate,
            value_discretization_interval=width,
            log_mass_truncation_bound=log_cut,
        )

    if scale and records > 1:
        raise AccountingError("the reference has no figure for several records with Laplace noise")
    several, lost = None, 0.0
    if records > 1 and segments:
        several, lost = _drawn(rate, records, delta * np.exp(-target) / steps)

    parts = []
    for count, factor in segments:
        if several is not None:
            step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
                multiplier * factor,
                *several,
                value_discretization_interval=width,
                log_mass_truncation_bound=log_cut,
            )
        elif scale:
            step = _laplace_step(rate, multiplier * factor, scale * factor, width, log_cut)
        else:
            step = gaussian(multiplier * factor, rate)
        parts.append(step.self_compose(count) if count > 1 else step)
    if run.closing is not None and closes:
        length = records * exposure.closing * run.closing.count**0.5
        parts.append(gaussian(run.closing.std / length, 1.0))
    if run.opening is not None:
        length = 1 if run.opening.together else records
        parts.append(gaussian(run.opening.std / length, 1.0))
    composed, *others = parts
    for part in others:
        composed = composed.compose(part)
    return composed, steps * lost


def search_name() -> str:
    """Return the name and version of the reference for private tuning."""
    return f"dp-accounting {version('dp-accounting')} RDP (RepeatAndSelect)"


def search_epsilon(
    law: RunLaw, run: RunCost, exposure: Exposure, delta: float, score_std: float | None
) -> float:
    """Return epsilon of the best of a random number of runs, according to dp-accounting.

    Args:
        law: the law of the number of runs.
        run, exposure: a run, and a record in it.
        delta: the delta.
        score_std: std of the noise on the score, of sensitivity 1; None if the score is public.
    """
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    rate, multiplier = exposure.sampling_rate, exposure.multiplier
    if run.release is not None:
        multiplier = (multiplier**-2.0 + (exposure.release / run.release.std) ** 2) ** -0.5
    parts: list[Any] = [
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier * factor)),
            count,
        )
        for count, factor in run.schedule.segments
        if rate > 0 and count
    ]
    others = [run.without_sampling(exposure.closing), np.inf if score_std is None else score_std]
    parts += [dp_event.GaussianDpEvent(std) for std in others if std < np.inf]
    if not parts:
        return 0.0
    search = dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(parts), law.mean, law.shape)
    accountant = RdpAccountant(_ORDERS)
    absl = logging.getLogger("absl")
    level = absl.level
    try:  # it excludes orders at which its series does not converge, and logs each
        absl.setLevel(logging.ERROR)
        return float(accountant.compose(search).get_epsilon(delta))
    finally:
        absl.setLevel(level)


def _drawn(
    sampling_rate: float, records: int, negligible: float
) -> tuple[tuple[list[float], list[float]], float]:
    """Return the numbers of drawn records with their probabilities, and a probability left out.

    Numbers whose total probability is negligible are replaced by the largest remaining one. That
    changes delta by at most the returned probability, times exp(epsilon), in each step.
    """
    end = 1
    while end < records and binom.sf(end, records, sampling_rate) > _LEFT_OUT * negligible:
        end *= 2  # an owner may declare billions of records
    counts = np.arange(min(end, records) + 1)
    tails = binom.sf(counts, records, sampling_rate)
    most = int(np.argmax(tails <= _LEFT_OUT * negligible))
    probabilities = binom.pmf(counts[: most + 1], records, sampling_rate)
    probabilities[-1] += tails[most]
    probabilities /= probabilities.sum()
    return (counts[: most + 1].tolist(), probabilities.tolist()), float(tails[most])


def _laplace_step(
    sampling_rate: float, multiplier: float, scale: float, width: float, log_cut: float
):
    """Return dp-accounting's distribution for a step with a Gaussian and a Laplace release.

    dp-accounting has no such mechanism, but can build a distribution from any curve of deltas. The
    curve is integrated over the Laplace coordinate by quadrature, with nodes in [0, 1] and one atom
    on either side.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    nodes, weights = np.polynomial.legendre.leggauss(64 + 8 * int(np.ceil(multiplier / scale)))
    place = np.concatenate([[0.0], 0.5 * (nodes + 1), [1.0]])
    loss = (2 * place - 1) / scale
    inside = 0.25 * weights / scale * np.exp(-place[1:-1] / scale)
    mass_q = np.concatenate([[0.5], inside, [0.5 * np.exp(-1 / scale)]])
    mass_p = mass_q * np.exp(loss)
    shift = 0.5 / multiplier
    reach = (np.sqrt(-2 * log_cut) / multiplier + 2 * shift**2) + 1 / scale

    def above(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for some in np.array_split(points, 1 + points.size * loss.size // 10**6):
            u = multiplier * (loss - some[:, None])
            parts.append((ndtr(u - shift) @ mass_q, ndtr(u + shift) @ mass_p))
        under_q, under_p = zip(*parts, strict=True)
        return np.concatenate(under_q), np.concatenate(under_p)

    def direction(removing: bool):
        sign = 1 if removing else -1
        ends = np.array([-reach, reach])  # losses before sampling
        if sampling_rate < 1:
            ends = np.log1p(sampling_rate * np.expm1(ends))
        ends *= sign
        low, high = np.floor(max(ends.min(), -50) / width), np.ceil(ends.max() / width)
        cells = np.arange(int(low), int(high) + 1)
        edges = width * cells
        crossing = sign * edges
        if sampling_rate < 1:
            with np.errstate(divide="ignore"):
                crossing = np.log1p(np.maximum(np.expm1(crossing) / sampling_rate, -1.0))
        crossing = np.maximum(crossing, -2 * reach - 50)
        if removing:
            base, other = above(crossing)
        else:  # 1 - above(crossing) is too imprecise: it is multiplied by exp(loss)
            other, base = above(-crossing)
        mixed = (1 - sampling_rate) * base + sampling_rate * other
        upper, lower = (mixed, base) if removing else (base, mixed)
        deltas = np.clip(upper - np.exp(edges) * lower, 0.0, 1.0)
        deltas = np.minimum.accumulate(deltas)
        return pld_pmf.create_pmf_pessimistic_connect_dots(width, cells, deltas)

    return privacy_loss_distribution.PrivacyLossDistribution(direction(True), direction(False))
