"""The filter of individual accounting: which records still take part, and what each has spent.

A record is charged before its gradient is used, for an upper bound on what it changes in the step.
A step that its budget does not pay for is its last: it retires, and changes nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ownerwise.planning import Plan

WHOLE = 2**60
"""A whole budget, in the units in which spends are counted."""

_ROUNDING = 1e-12  # covers the rounding of a cost in float64
_FACTOR_ROUNDING = 1e-6  # covers the rounding of a clipping factor in float32
_TINY = float(np.finfo(np.float64).tiny)
_LEAST_LENGTH = 1e-3  # of the clip norm: what is left of a budget is not used for less


@dataclass(frozen=True)
class Sensitivity:
    """How the length of a contribution bounds what it changes in the computed sum.

    Attributes:
        relative: relative error of a computed length.
        absolute: what rounding may add, in units of the clip norm of the record's owner.
    """

    relative: float
    absolute: float


class IndividualFilter:
    """Admits records to a step while their own contributions leave budget, and counts their spends.

    Formal guarantee (docs/proofs/individual.md): let d_t be what a record of owner o changes in the
    sum of step t, which depends on the released results of earlier steps. The filter lets the
    record take part only if the sum of (d_t / s)^2 up to and including this step is at most
    `plan.filter_limits[o]`. All steps together are then (targets[o], deltas[o])-differentially
    private for the record, however many steps are taken. Whether a record takes part depends on
    this record and on released results alone.

    The charge is an upper bound on d_t: the length of the contribution, plus everything that
    rounding may add, but never more than the clip norm, which the step guarantees anyway. A record
    whose gradient is clipped is charged its clip norm exactly. A spend is a whole number of
    2^-60 of the budget, and every charge is rounded up, so sums are exact.

    A record is known by its place in the data. The data must therefore be the same, in the same
    order, in every step and after a restart: if two records of one owner change places, which
    nothing notices, each continues from the other's spends, and one of them may spend up to its
    budget once more. Spends of whole owners do not depend on the order of their records.

    Spends and the set of active records are NOT PRIVATE.

    Args:
        plan: the plan, with owners and their records.
        sensitivity: how rounding adds to a contribution.
    """

    def __init__(self, plan: Plan, sensitivity: Sensitivity):
        assert plan.filter_limits is not None
        assert plan.owners is not None
        assert plan.owners.record_owner_index is not None
        of, by_owner = plan.holders, plan.sampling == "owner"
        holder = plan.owners.record_owner_index
        if by_owner:
            holder = np.arange(len(plan.targets))
        assert of.filter_limits is not None
        self.by_owner = by_owner
        self.to_remaining = plan.clip_to_remaining
        self._sensitivity = sensitivity
        self._clip_norms = of.clip_norms[holder]
        self._room = of.filter_limits[holder] * plan.noise_std**2  # for the squares of lengths
        self._spent = np.zeros(len(holder), dtype=np.int64)
        self._next = self._spent.copy()

    def __len__(self) -> int:
        """The number of records, or of owners if they are drawn as a whole."""
        return len(self._spent)

    @property
    def spent(self) -> np.ndarray:
        """NOT PRIVATE: what each record has spent, in units of 2^-60 of its budget, int64."""
        return self._spent.copy()

    @property
    def active(self) -> np.ndarray:
        """NOT PRIVATE: whether each record still takes part after the step that was begun last."""
        return self._next < WHOLE

    def begin(self) -> None:
        """Start a step."""
        self._next = self._spent.copy()

    def admit(self, members: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Charge some of the step's records, and return a factor from 0 to 1 for each.

        Args:
            members: their numbers.
            lengths: the computed lengths of their contributions after clipping, float64; negative
                if the factor is.
        """
        clips, room, before = self._clip_norms[members], self._room[members], self._next[members]
        charges = self._units(self._changes(lengths, clips), room)
        fits = (before < WHOLE) & (charges <= WHOLE - before)
        factors = fits.astype(np.float64)
        if self.to_remaining:
            last = ~fits & (before < WHOLE)
            left = (WHOLE - before[last]) / WHOLE * (1 - _ROUNDING)
            longest = np.sqrt(left * room[last]) - self._sensitivity.absolute * clips[last]
            longest *= (1 - _FACTOR_ROUNDING) / (1 + self._sensitivity.relative)
            usable = longest >= _LEAST_LENGTH * clips[last]
            longest = np.where(usable, longest, 0.0)
            factors[last] = longest / np.maximum(np.abs(lengths[last]), longest).clip(min=_TINY)
        self._next[members] = np.where(fits, before + np.where(fits, charges, 0), WHOLE)
        return factors

    def commit(self) -> None:
        """Finish charging a step, before its noise is drawn."""
        self._spent = self._next

    def charge_lost(self, steps: int) -> None:
        """Charge every record for steps about which nothing is known, as if it were clipped."""
        most = self._units(self._clip_norms, self._room)
        whole = (WHOLE - self._spent) // most  # the number of such steps that are left
        enough = steps <= whole
        self._spent = np.where(enough, self._spent + np.where(enough, steps, 0) * most, WHOLE)
        self._next = self._spent

    def load(self, spent: np.ndarray) -> None:
        """Continue from stored spends."""
        if spent.shape != self._spent.shape or spent.dtype != np.int64:
            raise ValueError(f"{spent.dtype} {spent.shape}")
        if len(spent) and not 0 <= spent.min() <= spent.max() <= WHOLE:
            raise ValueError("spends outside 0 to 2^60")
        self._spent = self._next = spent.copy()

    def _changes(self, lengths: np.ndarray, clips: np.ndarray) -> np.ndarray:
        """Return an upper bound on what each contribution changes in the computed sum."""
        sensitivity = self._sensitivity
        found = np.abs(lengths) * (1 + sensitivity.relative) + sensitivity.absolute * clips
        return np.minimum(found, clips)

    def _units(self, changes: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return the cost of these changes, rounded up; more than the whole budget is 2^61."""
        share = np.minimum(np.square(changes) / room * (1 + _ROUNDING), 2.0)
        return np.ceil(share * WHOLE).astype(np.int64)
