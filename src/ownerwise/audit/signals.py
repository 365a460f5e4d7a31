"""What an attacker who knows a model's outputs sees of every record, for many models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ownerwise.audit.heads import Heads
from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import SecretStream

FEWEST_FOR_STD = 32
"""With fewer shadow models with (or without) a record, all records share one standard deviation."""

_LEAST_STD = 1e-6


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
        if not np.isfinite(self.confidences).all():
            broken = int((~np.isfinite(self.confidences)).any(axis=1).sum())
            raise OwnerwiseError(
                f"{broken} of {len(self)} models have confidences that are not finite: their "
                "training diverged, so nothing can be concluded. Lower the learning rate"
            )

    def __len__(self) -> int:
        return len(self.confidences)

    @cached_property
    def with_record(self) -> tuple[np.ndarray, np.ndarray]:
        """Median and standard deviation of each record's confidence in models trained on it."""
        return _fitted(self.confidences, self.included)

    @cached_property
    def without_record(self) -> tuple[np.ndarray, np.ndarray]:
        """The same in models that were not trained on it."""
        return _fitted(self.confidences, ~self.included)

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


def _fitted(values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the median and standard deviation of each record's chosen values."""
    masked = np.where(chosen, values, np.nan)
    counts = chosen.sum(axis=0)
    known = counts > 0
    median = np.full(values.shape[1], np.nanmedian(masked))
    median[known] = np.nanmedian(masked[:, known], axis=0)
    squares = np.where(chosen, (values - median) ** 2, 0.0)
    std = np.sqrt(squares.sum(axis=0) / np.maximum(counts - 1, 1))
    if counts.min() < FEWEST_FOR_STD:
        freedom = max(1, int((counts - 1).clip(0).sum()))
        std = np.full_like(std, np.sqrt(squares.sum() / freedom))
    return median, np.maximum(std, _LEAST_STD)
