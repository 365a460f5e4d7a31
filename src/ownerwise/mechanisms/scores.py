"""Scores: what puts the records of a batch in order. The highest score is the most important.

A score may depend on the record itself, on the model (past private outputs) and on public
constants of the plan, never on other records: then adding a record does not reorder the others,
which the sensitivity of INO rests on (docs/proofs/ino.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ownerwise.randomness import (
    SecretStream,
)

if TYPE_CHECKING:
    from ownerwise.planning import (
        Plan,
    )

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
    """A random order, from a secret stream of its own: for ablations.

    With a fixed seed a resumed run goes on with the numbers of the uninterrupted one. A private
    stream never goes back.
    """

    def __init__(self, stream: SecretStream | None = None):
        self._root = SecretStream() if stream is None else stream
        self._begin(0)

    def __call__(
        self, losses: np.ndarray, owner_index: np.ndarray, plan: Plan | None
    ) -> np.ndarray:
        """Return uniform random numbers."""
        numbers = self._stream.at_step(self._draws)
        self._draws += 1
        return numbers.uniforms(len(losses))

    @property
    def private(self) -> bool:
        """Whether nobody knows the numbers: INO's guarantee rests on that here."""
        return self._stream.private

    def state(self) -> dict[str, Any]:
        """Return the draws so far; of a private stream nothing: they tell of empty batches."""
        return {} if self._stream.private else {"draws": self._draws}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a stored state; a private stream just goes on."""
        if not self._stream.private:
            self._begin(state.get("draws", 0))

    def _begin(self, draws: int) -> None:
        self._stream = self._root.child("random score")
        self._draws = draws


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
