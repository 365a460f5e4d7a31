"""What an attacker who knows a model's outputs sees of every record, for many models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ownerwise.audit.heads import Heads
from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import SecretStream


@dataclass(frozen=True, eq=False)
class Signals:
    """NOT PRIVATE: how confident each of many models is about each record's class.

    Attributes:
        confidences: log p - log(1 - p) of each record's class, float64 [models, records].
        included: whether each model was trained on each record, [models, records].
    """

    confidences: np.ndarray = field(repr=False)
    included: np.ndarray = field(repr=False)

    def __post_init__(self):
        if self.confidences.shape != self.included.shape or self.confidences.ndim != 2:
            raise OwnerwiseError(
                f"confidences have shape {self.confidences.shape} and included "
                f"{self.included.shape}; expected [models, records] for both"
            )

    def __len__(self) -> int:
        return len(self.confidences)

    def first(self, count: int) -> Signals:
        """Return the signals of the first `count` models."""
        return Signals(self.confidences[:count], self.included[:count])

    @classmethod
    def of_heads(cls, heads: Heads, models: int, stream: SecretStream) -> Signals:
        """Return the signals of many heads, each trained on a random half of the records."""
        included = coins(models, len(heads.labels), stream)
        return cls(heads.confidences(heads.train(included, stream)), included)

    @classmethod
    def of_models(
        cls,
        confidences: Callable[[np.ndarray], np.ndarray],
        models: int,
        records: int,
        stream: SecretStream,
    ) -> Signals:
        """Return the signals of models that are trained one by one.

        Args:
            confidences: trains one model on the records in a mask, by the private algorithm, and
                returns its confidence for every record, including those it was not trained on.
            models: number of models.
            records: number of records.
            stream: where the masks come from.
        """
        included = coins(models, records, stream)
        return cls(np.stack([confidences(mask) for mask in included]), included)


def coins(models: int, records: int, stream: SecretStream) -> np.ndarray:
    """Return a fair coin for every model and record, bool [models, records]."""
    draws = stream.child("shadows").at_step(0)
    return draws.coins(models * records).astype(bool).reshape(models, records)
