"""INO: ordered importance weights within each batch, at no cost to any owner's budget.

Formal guarantee (INO-SGD, Theorems 3.3 and 3.4; docs/proofs/ino.md): suppose that the records in a
batch are ordered by a score that depends only on the record itself, and that record i contributes a
vector of length at most C_i. With the weights below, adding or removing record i changes the
weighted sum by at most C_i. The step therefore has exactly the same privacy cost as a step without
weights. The tail's shape and length are public; the scores, the order, the weights and the batch's
total clip norm are private.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.plugs import Plug, Weights
from ownerwise.mechanisms.scores import ORDERS, BudgetAware, ByLoss, Score
from ownerwise.mechanisms.smooth_order import ordered_weights
from ownerwise.mechanisms.tails import Beta, Steps, Tail
from ownerwise.randomness import SecretStream

if TYPE_CHECKING:
    from ownerwise.planning import Plan

DEFAULT_TAIL = 0.4
LOSS_FLOOR, LOSS_CEILING = 0.1, 1e6
"""Losses are clamped to this public range. Records are ordered by the log of the clamped loss."""
_LARGEST_SPREAD = 1e6
_LOSS_ROUNDOFFS = 8.0  # bound on a loss's rounding error: absolute up to 1, relative above


@dataclass(frozen=True)
class INO(Weights):
    """Weights of 1 for the important records in a batch, falling to 0 over a tail of fixed length.

    Args:
        tail: tail length as a fraction of the plan's expected total clip norm; requires `bind`.
        alpha, beta: shape of the default tail, Beta(alpha, beta).
        tail_length: tail length in units of clip norm, instead of `tail`.
        shape: a different tail function, such as `Steps` or your own.
        score_by: the score that orders the records; the record with the highest score is the most
            important.
        width: smoothness of the order. Two losses that differ by a factor of e^width are fully
            separated. A width of 0 gives the paper's hard order, which requires a hardened plan.

    Example:
        >>> INO(tail_length=1.0).weights([30.0, 3.0, 0.3], [1.0, 1.0, 1.0]).round(6)
        array([1. , 1. , 0.5])
    """

    tail: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    tail_length: float | None = None
    shape: Tail | None = None
    score_by: Score = field(default_factory=ByLoss)
    width: float = 0.5
    _plan: Plan | None = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        problems = []
        if self.tail is not None and self.tail_length is not None and self._plan is None:
            problems.append("pass tail (a fraction) or tail_length (absolute), not both")
        if self.tail is None and self.tail_length is None:
            object.__setattr__(self, "tail", DEFAULT_TAIL)
        for name in ("tail", "tail_length"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                problems.append(f"{name} must be a finite number of at least 0, got {value}")
        if self.shape is not None and (self.alpha, self.beta) != (1.0, 1.0):
            problems.append(
                "alpha and beta apply only to the Beta tail; do not pass them with shape"
            )
        if self.width != 0 and not 0.01 <= self.width <= 10:
            problems.append(f"width must be 0 or a number from 0.01 to 10, got {self.width}")
        with _noted(problems):
            Beta(self.alpha, self.beta)
        if problems:
            raise OwnerwiseError(problems)

    @functools.cached_property
    def tail_function(self) -> Tail:
        """The tail importance function in use."""
        return Beta(self.alpha, self.beta) if self.shape is None else self.shape

    @property
    def private(self) -> bool:
        """True if the guarantee holds: each score depends only on its own record or on secret
        randomness."""
        return getattr(self.score_by, "private", True)

    def bind(self, plan: Plan) -> INO:
        """Return a copy of these weights, with the tail length computed from the public plan."""
        length = self.tail_length
        if self.tail is not None:
            of = plan.holders
            total = float(of.sampling_rates @ (of.elements * of.clip_norms))
            length = self.tail * total
        return replace(self, tail_length=length, _plan=plan)

    def score(self, losses: np.ndarray, owner_index: np.ndarray | None = None) -> np.ndarray:
        """Return one finite score per record, computed from the logarithm of its clamped loss."""
        clamped = np.fmax(losses, LOSS_FLOOR)  # fmax turns NaN into the floor
        np.minimum(clamped, LOSS_CEILING, out=clamped)
        return np.asarray(self.score_by(np.log(clamped, out=clamped), owner_index, self._plan))

    def settings(self) -> dict[str, Any]:
        """Return the options as JSON types; the width is included only if it is not the default."""
        options: dict[str, Any] = {"kind": "INO"}
        length = {"tail_length": self.tail_length} if self.tail is None else {"tail": self.tail}
        options |= length
        if self.shape is None:
            options |= {"alpha": self.alpha, "beta": self.beta}
        else:
            options["shape"] = repr(self.shape)
        if isinstance(self.score_by, BudgetAware):
            options["kappa"] = self.score_by.kappa
        elif not isinstance(self.score_by, ByLoss):
            options["score"] = type(self.score_by).__name__
        if self.width != INO.width:
            options["width"] = self.width
        return options

    @classmethod
    def from_settings(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        *,
        tail: float | None = None,
        tail_length: float | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        kappa: float = 0.0,
        width: float = 0.5,
        order: str = "loss",
        shape: Any = "beta",
        stream: SecretStream | None = None,
    ) -> INO:
        """Return INO with options of JSON types.

        Args:
            tail, tail_length, alpha, beta, width: as in `INO`.
            kappa: how much the budgets influence the order (`BudgetAware`).
            order: one of `ORDERS`, instead of kappa.
            shape: "beta", "steps", or the values of the steps.
            stream: the run's own stream if the seed is fixed; used by random orders.
        """
        numbers = {
            "tail": tail, "tail_length": tail_length, "alpha": alpha, "beta": beta,
            "kappa": kappa, "width": width,
        }  # fmt: skip
        problems = [
            f"{name} must be a number, got {value!r}"
            for name, value in numbers.items()
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
        ]
        if problems:
            raise OwnerwiseError(problems)
        score_by: Score = ByLoss()
        steps = None
        if kappa and order != "loss":
            problems.append("kappa applies only to the order 'loss'")
        with _noted(problems):
            score_by = ORDERS.make(order, stream)
        with _noted(problems):
            score_by = BudgetAware(kappa) if kappa else score_by
        with _noted(problems, "shape: "):
            steps = None if shape == "beta" else Steps() if shape == "steps" else Steps(shape)
        with _noted(problems):
            made = cls(tail, alpha, beta, tail_length, steps, score_by, width)
            if not problems:
                return made
        raise OwnerwiseError(problems)

    @property
    def stateful(self) -> bool:
        """Whether the score has a state."""
        return isinstance(self.score_by, Plug) and self.score_by.stateful

    def state(self) -> dict[str, Any]:
        """Return the state of the score."""
        return self.score_by.state() if isinstance(self.score_by, Plug) else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state of the score."""
        if isinstance(self.score_by, Plug):
            self.score_by.load_state(state)

    def score_slack(self, roundoff: float) -> float:
        """Return how much rounding may change the sum, per unit of the batch's total clip norm.

        If every loss l changes by up to 8 * roundoff * max(1, l), an owner's mean loss m changes by
        up to 8 * roundoff * (1 + m), so no score changes by more than 8 * roundoff *
        (1 + 1 / floor).
        """
        if self.tail_length == 0:
            return 0.0
        if self.width == 0:
            return float("inf")
        return 2.0 * _LOSS_ROUNDOFFS * roundoff * (1 + 1 / LOSS_FLOOR) / self.width

    def weights(
        self, losses: np.ndarray, clip_norms: np.ndarray, owner_index: np.ndarray | None = None
    ) -> np.ndarray:
        """Return one weight in [0, 1] per record (see `smooth_order`).

        Args:
            losses: one loss per record; NaN counts as the smallest loss.
            clip_norms: clip norm of each record's owner.
            owner_index: index of each record's owner in the plan, for scores that use the plan.
        """
        losses = np.asarray(losses, dtype=np.float64)
        return self.weights_of_scores(self.score(losses, owner_index), clip_norms, self.width)

    def weights_of_scores(
        self, scores: np.ndarray, clip_norms: np.ndarray, width: float = 0.0
    ) -> np.ndarray:
        """Return one weight in [0, 1] per finite score. Equal scores get equal weights."""
        if self.tail_length is None:
            raise ValueError(
                f"INO(tail={self.tail}) is a fraction of a plan's expected total clip norm: bind "
                "it to a plan first (the private step does this), or pass tail_length. Using the "
                "batch's own total would make the tail depend on the data"
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
        smallest, largest = clips.min(), clips.max()  # nan if any of them is
        if not 0 < smallest <= largest < np.inf:
            raise ValueError("clip norms must be positive and finite")
        if largest > _LARGEST_SPREAD * smallest:
            raise ValueError(
                f"clip norms from {smallest:g} to {largest:g} differ by more than a factor "
                f"of {_LARGEST_SPREAD:g}: the weights would be too inaccurate for the guarantee"
            )
        if self.tail_length == 0:
            return np.ones(len(clips))
        return ordered_weights(scores, clips, self.tail_function, self.tail_length, width)


@contextmanager
def _noted(problems: list[str], place: str = "") -> Iterator[None]:
    """Add the problems of an error raised in the `with` block to the list, and continue."""
    try:
        yield
    except ValueError as error:
        problems += [place + text for text in getattr(error, "problems", [str(error)])]
