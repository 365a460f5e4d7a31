"""An additional release from the same batches as the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ownerwise.errors import AccountingError

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


def joint_multiplier(multiplier: Any, release_std: Any) -> Any:
    """Return the multiplier of a step that also releases a sum with Gaussian noise.

    The sum has sensitivity 1. Both releases come from ONE Poisson batch, so they form one Gaussian
    mechanism with multiplier (m^-2 + release_std^-2)^-1/2, sampled once. Accounting for them as two
    separately sampled mechanisms would understate epsilon.
    """
    return (multiplier**-2.0 + release_std**-2.0) ** -0.5
