"""Scores: what puts the records of a batch in order. The highest score is the most important.

A score may depend on the record itself, on the model (past private outputs) and on public
constants of the plan, never on other records: then adding a record does not reorder the others,
which the sensitivity of INO rests on (docs/proofs/ino.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ownerwise.random import SecretStream

if TYPE_CHECKING:
    from ownerwise.plans import Plan

Score = Callable[[np.ndarray, np.ndarray, "Plan | None"], np.ndarray]
"""score(losses, owner_index, plan): one number per record."""


def pull(plan: Plan) -> np.ndarray:
    """Return every owner's public pull on the update, r_o = rate * clip norm."""
    return plan.sampling_rates * plan.clip_norms


@dataclass(frozen=True)
class ByLoss:
    """The paper's order: the hardest records first."""

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return the losses."""
        return losses


@dataclass(frozen=True)
class ByNegativeLoss:
    """The easiest records first: for ablations."""

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return the negated losses."""
        return -losses


class AtRandom:
    """A random order, from a secret stream of its own: for ablations."""

    def __init__(self, stream: SecretStream | None = None):
        self._stream = (SecretStream() if stream is None else stream).child("random score")

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return uniform random numbers."""
        return self._stream.at_step(self._stream.next_step).uniforms(len(losses))


@dataclass(frozen=True)
class OwnerThenLoss:
    """The mixed order: owners with the least pull first, and by loss within an owner."""

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return scores ordered by the owner's pull, then by loss."""
        _, rank = np.unique(-pull(_needed(plan)), return_inverse=True)
        squashed = losses / (1.0 + np.abs(losses))  # in (-1, 1), same order
        return np.where(np.isnan(losses), np.nan, 2.0 * rank[owner_index] + squashed)


@dataclass(frozen=True)
class BudgetAware:
    """loss * (r_max / r_o)^kappa, r_o being the owner's public pull (rate * clip norm).

    kappa 0 is the order by loss; kappa towards infinity puts owners first and starves the laxest.
    In between, records of strict owners keep their weight, and hard records of lax owners too. A
    score of the record's own loss and of public constants only, so INO's guarantee covers it.
    """

    kappa: float = 1.0

    def __post_init__(self):
        if not 0 <= self.kappa < float("inf"):
            raise ValueError(f"kappa must be a finite number of at least 0, got {self.kappa}")

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return the losses, raised for owners with little pull (below 0: brought closer to 0)."""
        pulls = pull(_needed(plan))
        lift = ((pulls.max() / pulls) ** self.kappa)[owner_index]
        return np.where(losses < 0, losses / lift, losses * lift)


def _needed(plan: Plan | None) -> Plan:
    if plan is None:
        raise ValueError(
            "this score uses the owners' rates and clip norms: bind it to a plan first"
        )
    return plan
