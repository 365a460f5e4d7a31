"""The parts of a run that are accounted for (steps and releases), and the accountant to use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ownerwise.accounting import pld, rdp
from ownerwise.accounting.release import (
    ClosingRelease,
    OpeningRelease,
    PaidRelease,
    joint_multiplier,
)
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

ACCOUNTANTS: dict[str, Callable[..., float]] = {"pld": pld.epsilon, "rdp": rdp.epsilon}

LARGEST_OWNER_EPSILON = 100.0
"""Larger epsilons of several records together are not told apart."""


LARGEST_SHIFT = 30.0
"""If a step shifts the sum by this many standard deviations on average, its cost is unbounded."""


class Exposure(NamedTuple):
    """The quantities of one record that determine its privacy cost in a given run.

    Attributes:
        sampling_rate: probability that the record takes part in a step.
        multiplier: std of the noise on the gradients, divided by the record's clip norm.
        release: maximum length of the vector that the record adds to the release of a step.
        closing: maximum length of the vectors that it adds to the closing release.
    """

    sampling_rate: float
    multiplier: float
    release: float = 1.0
    closing: float = 1.0


@dataclass(frozen=True)
class RunCost:
    """The privacy cost of a run, as a function of a record's exposure.

    Attributes:
        schedule: number of steps, and the noise at each step.
        accountant: "pld" or "rdp".
        release: an additional release from the batch of every step, if any.
        closing: a release from all records after training, if any.
        opening: a release from all records before training, if any.
    """

    schedule: Schedule
    accountant: str = "pld"
    release: PaidRelease | None = None
    closing: ClosingRelease | None = None
    opening: OpeningRelease | None = None

    @classmethod
    def of(cls, run: RunCost | Schedule | int) -> RunCost:
        """Return `run` as a RunCost; it may be a number of steps, a schedule or a RunCost."""
        return run if isinstance(run, RunCost) else cls(Schedule.of(run))

    def without_sampling(self, closing: float, records: int = 1) -> float:
        """Return the multiplier of the releases from all records, as one Gaussian mechanism.

        Args:
            closing: maximum length of the vectors that a record adds to the closing release.
            records: the number of records that are added or removed together.
        """
        multiplier = math.inf
        if self.closing is not None:
            multiplier = self.closing.multiplier(records * closing)
        if self.opening is not None:
            opening = self.opening.multiplier(records)
            multiplier = float(joint_multiplier(multiplier, opening))
        return multiplier

    def epsilon(self, exposure: Exposure, delta: float, records: int = 1) -> float:
        """Return the epsilon of a record after all steps and releases.

        With `records` above 1, return the epsilon of that many records with the same exposure, all
        added or removed together.
        """
        rate, multiplier, in_release, in_closing = exposure
        closing = self.without_sampling(in_closing, records)
        release = self.release
        if release is not None and release.noise == "laplace" and records > 1:
            return group_epsilon(lambda one: self.epsilon(exposure, one), delta, records)
        if release is not None and release.noise == "laplace":
            # Always PLD: a request for Laplace noise with "rdp" is rejected. The std of Laplace
            # noise is sqrt(2) times its scale.
            scale = release.std / (math.sqrt(2.0) * in_release)
            return pld.epsilon(
                rate, multiplier, self.schedule, delta, closing=closing, laplace=scale
            )
        if release is not None:
            multiplier = float(joint_multiplier(multiplier, release.std / in_release))
        accountant = ACCOUNTANTS[self.accountant]
        return accountant(rate, multiplier, self.schedule, delta, closing=closing, records=records)

    def segments(self, exposure: Exposure, records: int = 1) -> list[rdp.Segment]:
        """Return the parts of the run for Renyi accounting; see `epsilon` for the arguments."""
        rate, multiplier, in_release, in_closing = exposure
        closing = self.without_sampling(in_closing, records)
        if self.release is not None and self.release.noise == "laplace":
            raise AccountingError(
                "a release with Laplace noise has no Renyi accounting here; expected Gaussian noise"
            )
        if self.release is not None:
            multiplier = float(joint_multiplier(multiplier, self.release.std / in_release))
        return rdp.segments_of(rate, multiplier, self.schedule, closing=closing, records=records)


def group_epsilon(epsilon_at: Callable[[float], float], delta: float, records: int) -> float:
    """Return a bound on the epsilon of several records, from the epsilon of one as a function.

    If one record has (e, d), then K records have (K e, d (exp(K e) - 1) / (exp(e) - 1)), because
    they can be removed one by one. The bound is loose; it is used where no dominating pair is known
    for K records. The result is the best bound over a grid of d, or infinity if none is below
    `LARGEST_OWNER_EPSILON`.
    """
    for log_one in math.log(delta) - np.arange(1.5 * LARGEST_OWNER_EPSILON):
        one = epsilon_at(math.exp(log_one))
        total = records * one
        if total > LARGEST_OWNER_EPSILON:
            break
        growth = math.expm1(total) / math.expm1(one) if one else float(records)
        if log_one + math.log(growth) <= math.log(delta):
            return total
    return math.inf
