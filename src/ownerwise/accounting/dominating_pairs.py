"""Dominating pairs for one step: its output with and without a record, before sampling.

In units of the record's contribution, the output is Q without the record and P with it. For the
gradient alone, Q = N(0, m^2) and P = N(1, m^2). For the gradient and a release with Laplace noise
of scale v, Q = N(0, m^2) x Lap(0, v) and P = N(1, m^2) x Lap(1, v); this dominates every pair of
neighbouring data sets, because a release costs most if a record's entire contribution is in one
coordinate. Both outputs come from one Poisson batch, so they form a single mechanism that is
subsampled once. (If the release has Gaussian noise too, the pair is again Gaussian: see
`joint_multiplier`.)

An accountant only needs the distribution of L = log(P/Q). Both pairs are symmetric: L under P is
distributed as -L under Q. With Laplace noise, L is the sum of a Gaussian and
(|a| - |a - 1|) / v, which has two atoms and an exponential density between them; that sum is
integrated in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from ownerwise.accounting.moments import TAIL, highest_order, log_moments, moments_at

_LOG_ROOT = 0.5 * np.log(2 * np.pi)
_BEYOND = 700.0  # exp stays finite
_LARGEST = 1000.0  # larger multipliers are reduced to this or 20 times the Laplace scale: safe


@dataclass(frozen=True)
class GaussianPair:
    """The pair for the gradient alone."""

    multiplier: float

    @property
    def bounded_loss(self) -> float:
        """The largest contribution of the release to |L|."""
        return 0.0

    def times(self, factor: float) -> GaussianPair:
        """Return the pair with all noise multiplied by `factor`."""
        return GaussianPair(self.multiplier * factor)

    def highest_order(self, sampling_rate: float) -> float:
        """Return the largest order worth evaluating."""
        return highest_order(sampling_rate, self.multiplier)

    def above(self, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return Q(L > loss) and P(L > loss)."""
        shift = 0.5 / self.multiplier
        return ndtr(-self.multiplier * loss - shift), ndtr(-self.multiplier * loss + shift)

    def log_moments(self, sampling_rate: float, orders: np.ndarray) -> np.ndarray:
        """Return log E_Q[(1 - q + q P/Q)^a] for every order a."""
        return log_moments(sampling_rate, self.multiplier, orders)


@dataclass(frozen=True)
class LaplacePair:
    """The pair for the gradient and a release with Laplace noise of scale `scale`."""

    multiplier: float
    scale: float

    def __post_init__(self):
        most = max(_LARGEST, 20 * self.scale)
        object.__setattr__(self, "multiplier", min(self.multiplier, most))

    @property
    def bounded_loss(self) -> float:
        """The largest contribution of the release to |L|."""
        return 1.0 / self.scale

    def times(self, factor: float) -> LaplacePair:
        """Return the pair with all noise multiplied by `factor`."""
        return LaplacePair(self.multiplier * factor, self.scale * factor)

    def highest_order(self, sampling_rate: float) -> float:
        """Return the largest order worth evaluating."""
        return highest_order(sampling_rate, self.multiplier)

    def above(self, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return Q(L > loss) and P(L > loss)."""
        half, jump = 0.5 / self.multiplier, self.bounded_loss
        loss = np.clip(loss, -_BEYOND, _BEYOND)
        middle = -self.multiplier * loss
        reach = self.multiplier * jump
        first = middle - reach - half
        under_q = ndtr(first) + 0.5 * np.exp(
            -0.5 * loss - 0.5 * jump - 0.5 * half**2 + _log_between(middle - reach, middle + reach)
        )
        under_p = ndtr(middle + reach + half) - 0.5 * np.exp(
            0.5 * loss - 0.5 * jump - 0.5 * half**2 + _log_between(middle - reach, middle + reach)
        )
        return np.clip(under_q, 0.0, 1.0), np.clip(under_p, 0.0, 1.0)

    def log_moments(self, sampling_rate: float, orders: np.ndarray) -> np.ndarray:
        """Return log E_Q[(1 - q + q P/Q)^a] for every order a, by the trapezoidal rule."""
        orders = np.asarray(orders, dtype=np.float64)
        if sampling_rate == 0.0:
            return np.zeros_like(orders)
        m, half, jump = self.multiplier, 0.5 / self.multiplier, self.bounded_loss
        step = min(0.25, m / 2.0) / m
        upper = (max(1.0, float(orders.max())) / m + TAIL) / m + jump
        least = min(0.0, float(orders.min())) / m
        if sampling_rate < 1:  # the loss after sampling cannot fall further
            least = max(least, -40.0 * m)
        lower = (least - TAIL - half) / m - jump
        loss = np.arange(lower, upper + step, step)
        middle, reach = -m * loss, m * jump
        # density of L under Q: two atoms, smoothed by the Gaussian, and the piece between them
        parts = [
            np.log(0.5 * m) - 0.5 * (middle - reach - half) ** 2 - _LOG_ROOT,
            np.log(0.5 * m) - jump - 0.5 * (middle + reach - half) ** 2 - _LOG_ROOT,
            np.log(0.25)
            - 0.5 * (loss + jump + half**2)
            + _log_between(middle - reach, middle + reach),
        ]
        log_weight = np.logaddexp.reduce(parts) + np.log(step)
        return moments_at(sampling_rate, loss, log_weight, orders)


Pair = GaussianPair | LaplacePair


def _log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the log probability that a standard normal lies between two points, low < high."""
    flip = low > 0  # the lower tail is more precise
    low, high = np.where(flip, -high, low), np.where(flip, -low, high)
    top = log_ndtr(high)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.log(-np.expm1(np.minimum(log_ndtr(low) - top, 0.0)))
    return top + np.where(np.isnan(gap), -np.inf, gap)
