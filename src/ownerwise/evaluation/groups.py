"""Recall in each group of evaluated records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GroupRecalls:
    """Recall in every group, and summaries over groups."""

    recalls: dict[Any, float]
    overall: float

    @property
    def worst(self) -> float:
        """Recall in the worst group."""
        return min(self.recalls.values())

    @property
    def spread(self) -> float:
        """Standard deviation of recall over groups."""
        return float(np.std(list(self.recalls.values())))

    @property
    def balanced(self) -> float:
        """Mean recall over groups."""
        return float(np.mean(list(self.recalls.values())))


def group_recalls(predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> GroupRecalls:
    """Return the fraction of correct predictions in each group and overall."""
    correct = np.asarray(predicted) == np.asarray(actual)
    names = np.asarray(groups)
    recalls = {name.item(): float(correct[names == name].mean()) for name in np.unique(names)}
    return GroupRecalls(recalls, float(correct.mean()))
