"""Caps on every attack: the trade-off between false alarms and detections that a run permits.

If an output is (epsilon, delta)-differentially private, a test with false-alarm rate f has a power
of at most e^epsilon f + delta, and of at most 1 - e^-epsilon (1 - delta - f). A run has such a
delta for every epsilon, given by its privacy loss distribution. The cap is the smallest of all
these bounds, so it holds for any choice of epsilons.

References: Wasserman, Zhou (2010), Section 2; Dong, Roth, Su (2022), "Gaussian Differential
Privacy", Proposition 2.12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ownerwise.accounting import Exposure, gaussian_mu, reference
from ownerwise.planning import Plan

_EPSILONS = 500
_LARGEST_EPSILON = 600.0  # exp stays finite
_LEAST_DELTA = 1e-12
_RATES = np.concatenate([[0.0], np.geomspace(1e-10, 0.5, 2000), np.linspace(0.5, 1.0, 2001)[1:]])


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The cap on any test of whether a record took part in a run.

    Attributes:
        epsilons, deltas: the run is (epsilon, delta)-differentially private for all these pairs.
    """

    epsilons: np.ndarray = field(repr=False)
    deltas: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, plan: Plan, owner: int, noise: float = 1.0) -> TradeOff:
        """Return the cap for the plan's unit of one owner.

        Args:
            plan: the plan.
            owner: the owner's position in the plan.
            noise: factor applied to all noise; 1 for the plan itself.
        """
        parts = (float(part[owner]) for part in plan.exposures)
        exposure = Exposure(*parts)
        exposure = exposure._replace(
            multiplier=exposure.multiplier * noise, release=exposure.release / noise
        )
        run = plan.run_cost
        if run.closing is not None:
            run = replace(run, closing=replace(run.closing, std=run.closing.std * noise))
        together = plan.counted_together
        records = 1 if together is None else int(max(together[owner], 1))
        delta, target = float(plan.deltas[owner]), float(plan.targets[owner])
        mu = gaussian_mu(target, delta) / min(noise, noise**2)  # sampling may magnify less noise
        target = max(target / max(noise, 1.0), 1e-3)
        composed, lost = reference.distribution(run, exposure, delta, target, records)
        largest = min(mu * mu / 2 + 7.5 * mu, _LARGEST_EPSILON)
        epsilons = np.concatenate([[0.0], np.geomspace(2e-4 * largest, largest, _EPSILONS)])
        if composed is None:
            return cls(np.zeros(1), np.zeros(1))
        deltas = np.array(composed.get_delta_for_epsilon(epsilons.tolist()))
        deltas += lost * np.exp(epsilons) + _LEAST_DELTA
        return cls(epsilons, np.minimum(deltas, 1.0))

    def power(self, false_alarms: np.ndarray | float) -> np.ndarray:
        """Return the largest possible rate of detections at each rate of false alarms."""
        rates = np.asarray(false_alarms, dtype=np.float64)[..., None]
        below = np.exp(self.epsilons) * rates + self.deltas
        above = 1 - np.exp(-self.epsilons) * (1 - self.deltas - rates)
        return np.minimum(below, above).min(axis=-1).clip(0.0, 1.0)

    def false_alarms(self, power: float) -> float:
        """Return the smallest possible rate of false alarms for a rate of detections."""
        below = (power - self.deltas) * np.exp(-self.epsilons)
        above = 1 - self.deltas - (1 - power) * np.exp(self.epsilons)
        return float(np.maximum(below, above).max().clip(0.0, 1.0))

    @cached_property
    def area(self) -> float:
        """The largest possible area under the curve (AUC) of an attack, rounded up."""
        highest = self.power(_RATES[1:])  # the power at the upper end of each interval
        return float(min(1.0, highest @ np.diff(_RATES)))

    @property
    def accuracy(self) -> float:
        """The largest possible balanced accuracy of an attack."""
        return float(1 + self.deltas[0]) / 2  # delta at epsilon 0 is the total variation distance

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at `delta`, interpolated between tabulated values."""
        if self.deltas[0] <= delta:
            return 0.0
        if self.deltas[-1] > delta:
            return math.inf
        return float(np.interp(-np.log(delta), -np.log(self.deltas), self.epsilons))
