"""Releases that a run makes in addition to its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.accounting.gaussian import gaussian_mu
from ownerwise.errors import AccountingError

NOISES = ("gaussian", "laplace")
"""Noise distributions for a release at every step."""


@dataclass(frozen=True)
class PaidRelease:
    """A sum of per-record vectors of length at most 1, released with noise at every step.

    It is computed from the same batch as the gradient. Together, K records contribute a vector of
    length at most K.

    Attributes:
        std: standard deviation of the noise.
        noise: "gaussian", or "laplace" (the length of a vector is then its L1 norm).
    """

    std: float
    noise: str = "gaussian"

    def __post_init__(self):
        if self.noise not in NOISES:
            raise AccountingError(f"release noise {self.noise!r}: expected {' or '.join(NOISES)}")
        _check_std("release", self.std)


@dataclass(frozen=True)
class ClosingRelease:
    """Sums over ALL records, of vectors of length at most 1, released once after training.

    Nothing is sampled: together, the sums form one Gaussian mechanism with multiplier std /
    (sqrt(count) * length), where length is the root mean square of an owner's lengths in the
    sums. An owner whose budget is stricter than `full_mu`, in terms of Gaussian differential
    privacy, contributes shorter vectors. Together, K records contribute vectors at most K times as
    long as those of one record.

    Attributes:
        std: standard deviation of the noise on each sum.
        count: number of sums; later ones may depend on earlier ones.
        full_mu: owners with at least this mu contribute vectors of length up to 1, all others
            vectors of length up to mu / full_mu. 0 if all contribute equally.
        pull_mu: if positive, owners contribute to the FIRST sum in proportion to their mu, up to
            mu / pull_mu and at most 1. Lengths in the other sums are then full_mu / pull_mu times
            those stated above.
    """

    std: float
    count: int = 1
    full_mu: float = 0.0
    pull_mu: float = 0.0

    def __post_init__(self):
        _check_std("closing release", self.std)
        if self.count < 1 or self.count != int(self.count):
            raise AccountingError(f"{self.count} closing releases: expected at least 1")
        for name in ("full_mu", "pull_mu"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise AccountingError(f"{name} {value:g}: expected a finite, non-negative number")
        if self.pull_mu and not 0 < self.full_mu <= self.pull_mu:
            raise AccountingError(
                f"full_mu {self.full_mu:g} with pull_mu {self.pull_mu:g}: expected a number above "
                "0 and at most pull_mu"
            )

    def multiplier(self, sensitivity: float) -> float:
        """Return the multiplier of all sums together, for vectors of length up to `sensitivity`."""
        return self.std / (math.sqrt(self.count) * sensitivity) if sensitivity else math.inf

    def sensitivity(self, epsilon: float, delta: float) -> float:
        """Return the length that determines the cost for an owner with this budget."""
        if not self.full_mu:
            return 1.0
        share, pull = self.lengths(gaussian_mu(epsilon, delta))
        return share if pull is None else joint_length(share, pull, self.count)

    def lengths(self, mu: Any) -> tuple[Any, Any]:
        """Return the maximum lengths of the vectors of an owner with this mu, if owners differ.

        The first number holds for all sums; if the second is not None, it holds for the first sum
        instead. `mu` may be an array.
        """
        if not self.pull_mu:
            return np.minimum(1.0, mu / self.full_mu), None
        share = np.minimum(mu, self.full_mu) / self.pull_mu
        return share, np.minimum(1.0, mu / self.pull_mu)


@dataclass(frozen=True)
class OpeningRelease:
    """A sum over ALL records, of vectors of length at most 1, released once before training.

    Nothing is sampled, so the sum is a Gaussian mechanism. Every owner pays the same for it.

    Attributes:
        std: standard deviation of the noise.
        together: whether all records of an owner together contribute a vector of length at most 1.
            If not, K records contribute a vector of length up to K.
    """

    std: float
    together: bool = False

    def __post_init__(self):
        _check_std("opening release", self.std)

    def multiplier(self, records: int = 1) -> float:
        """Return the multiplier for this many records of an owner."""
        return self.std if self.together else self.std / records


def joint_length(share: Any, pull: Any, count: int) -> Any:
    """Return the root mean square of the lengths in `count` sums: `pull` once, else `share`."""
    return np.sqrt(((count - 1) * np.square(share) + np.square(pull)) / count)


def joint_multiplier(multiplier: Any, release_std: Any) -> Any:
    """Return the multiplier of a step that also releases a sum with Gaussian noise.

    The sum has sensitivity 1. Both releases come from ONE Poisson batch, so they form one Gaussian
    mechanism with multiplier (m^-2 + release_std^-2)^-1/2, sampled once. Accounting for them as two
    separately sampled mechanisms would understate epsilon.
    """
    return (multiplier**-2.0 + release_std**-2.0) ** -0.5


def _check_std(name: str, std: float) -> None:
    if not 0 < std < math.inf:
        raise AccountingError(f"{name} std {std:g}: expected a finite number above 0")
