"""Scores for tests of INO: orders that the library does not offer, and one that remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.mechanisms import Plug
from ownerwise.mechanisms.scores import needed_plan, pull
from ownerwise.planning import Plan
from ownerwise.randomness import SecretStream


@dataclass(frozen=True)
class EasiestFirst:
    """Records by increasing loss."""

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        return -log_losses


@dataclass(frozen=True)
class OwnersFirst:
    """Owners with the least pull first, and records by loss within an owner."""

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        _, rank = np.unique(-pull(needed_plan(plan)), return_inverse=True)
        return 20.0 * rank[owner_index] + log_losses


class Shuffled(Plug):
    """A random order with a state: it counts its draws, and may be secret."""

    def __init__(self, stream: SecretStream | None = None):
        self._root = SecretStream() if stream is None else stream
        self.load_state({})

    @property
    def private(self) -> bool:
        return self._root.private

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        numbers = self._stream.at_step(self._draws).uniforms(len(log_losses))
        self._draws += 1
        return 1000.0 * numbers

    def state(self) -> dict[str, Any]:
        return {} if self.private else {"draws": self._draws}

    def load_state(self, state: dict[str, Any]) -> None:
        if not hasattr(self, "_stream") or not self.private:
            self._stream, self._draws = self._root.child("order"), state.get("draws", 0)
