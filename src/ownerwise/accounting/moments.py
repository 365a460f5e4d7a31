"""Moments of one step: the Poisson-subsampled Gaussian mechanism SGM(q, m).

The output of one step is P = (1-q) N(0, m^2) + q N(1, m^2) with a record and Q = N(0, m^2) without
it, in units of the record's clip norm. An accountant only needs the moments M(a) = E_Q[(P/Q)^a].
The Renyi divergence of order a is log M(a) / (a - 1). The privacy loss log(P/Q) has the log moment
generating function log M(1+t) when the record is removed, and -log(P/Q) has log M(-t) when it is
added.

References: Mironov, Talwar, Zhang (2019), "Renyi Differential Privacy of the Sampled Gaussian
Mechanism", section 3, shows that these two directions are the worst case.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp

from ownerwise.errors import AccountingError

MAX_SHIFT = 1000.0
"""Orders above MAX_SHIFT * m are not evaluated: their mass is too far out to tabulate."""

LEAST_MULTIPLIER = 0.02
"""Smaller multipliers are rejected.

With them, epsilon would exceed 1000, and the integrals would grow without bound.
"""

TAIL = 13.0
"""Number of standard deviations to integrate over: 1e-38 of the mass lies outside."""


def highest_order(sampling_rate: float, multiplier: float) -> float:
    """Return the largest order worth evaluating.

    Above about 2 m^2 log(1/q), the moments of the subsampled Gaussian mechanism explode (the branch
    with the record dominates), so higher orders give no useful bound; a margin of 50% is added.
    """
    if multiplier < LEAST_MULTIPLIER:
        raise AccountingError(
            f"noise multiplier {multiplier:g}: expected at least {LEAST_MULTIPLIER:g}; with less "
            "noise there is almost no privacy, and the loss cannot be tabulated"
        )
    explosion = 3.0 * multiplier**2 * max(1.0, math.log(1.0 / sampling_rate))
    return max(8.0, min(MAX_SHIFT * multiplier, 10.0 + explosion))


def log_moments(sampling_rate: float, multiplier: float, orders: np.ndarray) -> np.ndarray:
    """Return log E_Q[(P/Q)^a] for every real order a in `orders`.

    The integral is computed by the trapezoidal rule over the whole line, which converges faster
    than any power of the step for this analytic integrand. The nearest singularity is pi*m off the
    axis, and the step is small enough to keep the error below e^-39. The identity E_Q[P/Q - 1] = 0
    is used exactly, so results keep full precision even at tiny rates.
    """
    orders = np.asarray(orders, dtype=np.float64)
    if sampling_rate == 0.0:
        return np.zeros_like(orders)
    if sampling_rate == 1.0:
        return orders * (orders - 1.0) / (2.0 * multiplier**2)
    step = min(0.25, multiplier / 2.0)
    upper = max(1.0, float(orders.max())) / multiplier + TAIL
    lower = max(min(0.0, float(orders.min())) / multiplier, -multiplier * 40.0) - TAIL
    u = np.arange(lower, upper + step, step)  # standard deviations of Q
    log_weight = -0.5 * u**2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    tilt = u / multiplier - 0.5 / multiplier**2  # log density ratio N(1, m^2) / N(0, m^2)
    return moments_at(sampling_rate, tilt, log_weight, orders)


def moments_at(
    sampling_rate: float, loss: np.ndarray, log_weight: np.ndarray, orders: np.ndarray
) -> np.ndarray:
    """Return log E_Q[(P/Q)^a] for every order a, by summing over nodes.

    `loss` is the log density ratio before sampling, and `log_weight` the log mass under Q. The
    masses must add up to 1, and E_Q[exp(loss)] must be 1.
    """
    if sampling_rate == 1.0:
        gain, log_ratio = np.expm1(np.minimum(loss, 600.0)), loss
    else:
        with np.errstate(over="ignore"):
            gain = sampling_rate * np.expm1(loss)  # P/Q - 1
            log_ratio = np.where(
                loss < 30.0,
                np.log1p(gain),
                np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + loss),
            )  # [nodes], log P/Q
    return moments_of(log_ratio, gain, log_weight, orders)


def moments_of(
    log_ratio: np.ndarray, gain: np.ndarray, log_weight: np.ndarray, orders: np.ndarray
) -> np.ndarray:
    """Return log E_Q[exp(a * log_ratio)] for every order a, by summing over nodes.

    `gain` is close to exp(log_ratio) - 1 and has mean 0 under Q; subtracting `a * gain` from the
    integrand keeps small moments precise.
    """
    powers = orders[:, None] * log_ratio  # [orders, nodes]
    with np.errstate(over="ignore", invalid="ignore"):
        weight = np.exp(log_weight)
        excess = np.where(
            powers < 30.0,
            weight * (np.expm1(powers) - orders[:, None] * gain),
            np.exp(powers + log_weight) - orders[:, None] * (gain * weight),
        ).sum(axis=1)  # M(a) - 1
        small_moment = np.isfinite(excess) & (np.abs(excess) < 0.5)
    result = np.empty_like(orders)
    result[small_moment] = np.log1p(excess[small_moment])
    large = ~small_moment
    if large.any():
        result[large] = logsumexp(powers[large] + log_weight, axis=1)
    return result
