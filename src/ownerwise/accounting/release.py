"""The cost of an additional release from the same batches as the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.accounting import pld, rdp
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

ACCOUNTANTS: dict[str, Callable[[float, float, Schedule, float], float]] = {
    "pld": pld.epsilon,
    "rdp": rdp.epsilon,
}

NOISES = ("gaussian", "laplace")
"""Noise distributions for an additional release."""


@dataclass(frozen=True)
class PaidRelease:
    """A sum of per-record vectors of length at most 1, released with noise at every step.

    Attributes:
        std: standard deviation of the noise.
        noise: "gaussian", or "laplace" (the length of a vector is then its L1 norm).
    """

    std: float
    noise: str = "gaussian"

    def __post_init__(self):
        if self.noise not in NOISES:
            raise AccountingError(f"release noise {self.noise!r}: expected {' or '.join(NOISES)}")
        if not 0 < self.std < float("inf"):
            raise AccountingError(f"release std {self.std:g}: expected a finite number above 0")


def owner_epsilon(
    accountant: str,
    sampling_rate: float,
    multiplier: float,
    schedule: Schedule,
    delta: float,
    release: PaidRelease | None = None,
    release_sensitivity: float = 1.0,
) -> float:
    """Return the epsilon of one owner after all steps.

    Each record of the owner contributes at most `release_sensitivity` to the release.
    """
    if release is not None and release.noise == "laplace":
        scale = release.std / (np.sqrt(2.0) * release_sensitivity)
        return pld.epsilon(sampling_rate, multiplier, schedule, delta, float(scale))
    if release is not None:
        multiplier = float(joint_multiplier(multiplier, release.std / release_sensitivity))
    return ACCOUNTANTS[accountant](sampling_rate, multiplier, schedule, delta)


def joint_multiplier(multiplier: Any, release_std: Any) -> Any:
    """Return the multiplier of a step that also releases a sum with Gaussian noise.

    The sum has sensitivity 1. Both releases come from ONE Poisson batch, so they form one Gaussian
    mechanism with multiplier (m^-2 + release_std^-2)^-1/2, sampled once. Accounting for them as two
    separately sampled mechanisms would understate epsilon.
    """
    if release_std is None:
        return multiplier
    return (multiplier**-2.0 + release_std**-2.0) ** -0.5
