"""Other orders of records, for ablations of INO-SGD.

Each function at the end of this module returns the score for a named order; the entry points in the
group `ownerwise.orders` refer to these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.mechanisms import Plug, Score
from ownerwise.mechanisms.scores import needed_plan, pull
from ownerwise.planning import Plan
from ownerwise.randomness import SecretStream

_OWNER_GAP = 20.0  # more than the log losses of one owner can span


@dataclass(frozen=True)
class ByNegativeLoss:
    """Order records with the easiest first."""

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        """Return the negated log losses."""
        return -log_losses


class AtRandom(Plug):
    """Order records at random, with its own secret stream.

    With a fixed seed, a resumed run draws the same numbers as an uninterrupted one. A private
    stream never repeats its numbers.
    """

    def __init__(self, stream: SecretStream | None = None):
        self._root = SecretStream() if stream is None else stream
        self._begin(0)

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        """Return uniform random numbers from a range so wide that few records share a level."""
        numbers = self._stream.at_step(self._draws)
        self._draws += 1
        return 1000.0 * numbers.uniforms(len(log_losses))

    @property
    def private(self) -> bool:
        """Whether the numbers are secret, as INO-SGD's guarantee requires for this order."""
        return self._stream.private

    def state(self) -> dict[str, Any]:
        """Return the draw count, or {} for a private stream, whose count reveals empty batches."""
        return {} if self._stream.private else {"draws": self._draws}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; a private stream ignores it."""
        if not self._stream.private:
            self._begin(state.get("draws", 0))

    def _begin(self, draws: int) -> None:
        self._stream = self._root.child("random score")
        self._draws = draws


@dataclass(frozen=True)
class OwnerThenLoss:
    """The mixed order: owners from least to most influential, and each owner's records by loss."""

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        """Return scores that order the records by their owner's influence, then by loss."""
        _, rank = np.unique(-pull(needed_plan(plan)), return_inverse=True)
        return _OWNER_GAP * rank[owner_index] + log_losses


def negative_loss(stream: SecretStream | None) -> Score:
    """Return the order `negative-loss`."""
    return ByNegativeLoss()


def random(stream: SecretStream | None) -> Score:
    """Return the order `random`."""
    return AtRandom(stream)


def owner_then_loss(stream: SecretStream | None) -> Score:
    """Return the order `owner-then-loss`."""
    return OwnerThenLoss()
