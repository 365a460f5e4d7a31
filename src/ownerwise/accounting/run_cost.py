"""What is accounted for: the steps of a run, by which accountant, and what each step releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ownerwise.accounting import pld, rdp
from ownerwise.accounting.release import PaidRelease, joint_multiplier
from ownerwise.accounting.schedule import Schedule

ACCOUNTANTS: dict[str, Callable[[float, float, Schedule, float], float]] = {
    "pld": pld.epsilon,
    "rdp": rdp.epsilon,
}


@dataclass(frozen=True)
class RunCost:
    """The privacy cost of a run, as a function of an owner's sampling rate and noise multiplier.

    Attributes:
        schedule: number of steps, and the noise at each step.
        accountant: "pld" or "rdp".
        release: an additional release from the same batches, if any.
    """

    schedule: Schedule
    accountant: str = "pld"
    release: PaidRelease | None = None

    @classmethod
    def of(cls, run: RunCost | Schedule | int) -> RunCost:
        """Return `run` as a RunCost; it may be a number of steps, a schedule or a RunCost."""
        return run if isinstance(run, RunCost) else cls(Schedule.of(run))

    def epsilon(
        self,
        sampling_rate: float,
        multiplier: float,
        delta: float,
        release_sensitivity: float = 1.0,
    ) -> float:
        """Return the epsilon of one owner after all steps.

        Each record of the owner contributes at most `release_sensitivity` to the release.
        """
        release = self.release
        if release is not None and release.noise == "laplace":
            scale = release.std / (math.sqrt(2.0) * release_sensitivity)
            return pld.epsilon(sampling_rate, multiplier, self.schedule, delta, scale)
        if release is not None:
            multiplier = float(joint_multiplier(multiplier, release.std / release_sensitivity))
        return ACCOUNTANTS[self.accountant](sampling_rate, multiplier, self.schedule, delta)
