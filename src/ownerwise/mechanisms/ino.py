"""INO: ordered importance weights within each batch, at no cost to any owner's budget.

Formal guarantee (INO-SGD, Theorems 3.3 and 3.4; docs/proofs/ino.md): order the records of a batch
by a score that each record has on its own, and let record i contribute a vector of length at most
C_i. With the weights below, adding or removing record i changes the weighted sum by at most C_i.
The step therefore costs exactly as much as without weights. Public: the tail's shape and length.
Private: scores, order, weights, the batch's total clip norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ownerwise.mechanisms.scores import ByLoss, Score
from ownerwise.mechanisms.tails import Beta, Tail

if TYPE_CHECKING:
    from ownerwise.planning import Plan

DEFAULT_TAIL = 0.4
_LARGEST_SPREAD = 1e6


@dataclass(frozen=True)
class INO:
    """Weight 1 for the important records of a batch, falling to 0 over a tail of fixed length.

    Args:
        tail: tail length as a fraction of the plan's expected total clip norm; needs `bind`.
        alpha, beta: shape of the default tail, Beta(alpha, beta).
        tail_length: tail length in units of clip norm, instead of `tail`.
        shape: another tail function (`Steps`, or your own).
        score_by: the score that orders the records; the highest is the most important.

    Example:
        >>> INO(tail_length=1.0).weights([3.0, 2.0, 1.0], [1.0, 1.0, 1.0])
        array([1. , 1. , 0.5])
    """

    tail: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    tail_length: float | None = None
    shape: Tail | None = None
    score_by: Score = field(default_factory=ByLoss)
    _plan: Plan | None = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if self.tail is not None and self.tail_length is not None and self._plan is None:
            raise ValueError("give tail (a fraction) or tail_length (absolute), not both")
        if self.tail is None and self.tail_length is None:
            object.__setattr__(self, "tail", DEFAULT_TAIL)
        for name in ("tail", "tail_length"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if self.shape is not None and (self.alpha, self.beta) != (1.0, 1.0):
            raise ValueError("alpha and beta shape the Beta tail; do not give them with shape")
        Beta(self.alpha, self.beta)  # validates both now

    @property
    def tail_function(self) -> Tail:
        """The tail importance function in use."""
        return Beta(self.alpha, self.beta) if self.shape is None else self.shape

    @property
    def private(self) -> bool:
        """Whether the guarantee holds: each record determines its own score, or it is secret."""
        return getattr(self.score_by, "private", True)

    def bind(self, plan: Plan) -> INO:
        """Return these weights with the tail length fixed by the public plan."""
        length = self.tail_length
        if self.tail is not None:
            total = float(plan.sampling_rates @ (plan.records * plan.clip_norms))
            length = self.tail * total
        return replace(self, tail_length=length, _plan=plan)

    def score(self, losses: np.ndarray, owner_index: np.ndarray) -> np.ndarray:
        """Return one score per record."""
        return np.asarray(self.score_by(np.asarray(losses), np.asarray(owner_index), self._plan))

    def weights(self, scores: np.ndarray, clip_norms: np.ndarray) -> np.ndarray:
        """Return one weight in [0, 1] per record, exact in float64, in O(n log n).

        Records are ordered by decreasing score, ties by position, so that adding a record reorders
        no others; NaN comes last. Let R_k be the sum of the clip norms from rank k to the last, and
        H the integral of the importance, measured from the end of the batch (the tail first, 1
        beyond it). Rank k has the weight (H(R_k) - H(R_k+1)) / C_k, its average importance.
        """
        if self.tail_length is None:
            raise ValueError(
                f"INO(tail={self.tail}) is a fraction of a plan's expected clip norm: bind it to a "
                "plan first (the private step does), or give tail_length. Using the batch's own "
                "total would make the tail depend on the data"
            )
        scores = np.asarray(scores, dtype=np.float64)
        clips = np.asarray(clip_norms, dtype=np.float64)
        if scores.shape != clips.shape or scores.ndim != 1:
            raise ValueError(
                f"scores have shape {scores.shape} and clip norms {clips.shape}; expected one of "
                "each per record"
            )
        if not len(clips):
            return np.zeros(0)
        if not ((clips > 0) & np.isfinite(clips)).all():
            raise ValueError("clip norms must be positive and finite")
        if clips.max() > _LARGEST_SPREAD * clips.min():
            raise ValueError(
                f"clip norms from {clips.min():g} to {clips.max():g} differ by more than a factor "
                f"of {_LARGEST_SPREAD:g}: the weights would be too inexact for the guarantee"
            )
        if self.tail_length == 0:
            return np.ones(len(clips))
        order = np.argsort(-scores, kind="stable")  # NaN sorts last
        ordered = clips[order]
        rest = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)  # R_k, and 0 after the last
        area, height = self._from_end(rest)
        average = (area[:-1] - area[1:]) / ordered
        weights = np.empty(len(clips))
        weights[order] = np.clip(average, height[1:], height[:-1])
        return weights

    def _from_end(self, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return H and its derivative at distance `rest` from the end of the batch."""
        assert self.tail_length is not None
        tail = self.tail_function
        inside = np.minimum(rest / self.tail_length, 1.0)
        beyond = np.maximum(rest - self.tail_length, 0.0)
        area = self.tail_length * tail.area(inside) + beyond
        height = np.where(rest >= self.tail_length, 1.0, tail.rising(inside))
        return area, height
