"""What plugs into the private step: weights over the batch, a release, and what they may see."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import (
    LayerRandomness,
    StepStream,
)

if TYPE_CHECKING:
    from ownerwise.batches import (
        Batch,
    )
    from ownerwise.planning import (
        Plan,
    )


class Weights(Protocol):
    """Weights in [0, 1] per record that depend on the whole batch, such as INO.

    Formal guarantee asked of them: for every batch and record i, the weighted sum of clipped
    gradients with and without i differs by at most the clip norm of i's owner.
    """

    def bind(self, plan: Plan) -> Self:
        """Return the weights with the public constants of the plan filled in."""
        ...

    def score(self, losses: np.ndarray, owner_index: np.ndarray) -> np.ndarray:
        """Return one score per record, from its own loss and public constants only."""
        ...

    def weights(self, scores: np.ndarray, clip_norms: np.ndarray) -> np.ndarray:
        """Return one weight per record from scores and clip norms of the whole batch."""
        ...


class Release(Protocol):
    """A sum over the batch that is noised and released before the loss: a histogram, counts.

    The plan must pay for it (`release_std`). Every record's contribution is cut to length 1 (to a
    sum of absolute values of 1, if the noise is Laplace). It is made in every step, of an empty
    batch too, so its shape is public.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record's contribution, and of the release."""
        ...

    def contributions(self, outputs: Any, targets: Any) -> Tensor:
        """Return one vector per record, [records, ...], from its own outputs and targets."""
        ...


class Steering(Protocol):
    """Changes sampling rates and clip norms during a run, from a noisy count of its records.

    The plan pays for the count (`release_std`): each record adds 0 or 1 to it, with its own
    factor. Formal guarantee asked of it: `share` and `clip_scale` are functions of public constants
    and of earlier noisy counts, and `share` is at most 1. Then every step costs at most what the
    plan accounts for: records take part at most at their planned rates, and clip norms and noise
    grow or shrink together (docs/proofs/dpis.md).
    """

    @property
    def share(self) -> float:
        """Share of the drawn records that take part, in (0, 1]."""
        ...

    @property
    def clip_scale(self) -> float:
        """What all clip norms, and the noise with them, are multiplied by."""
        ...

    def begin(self, batch: Batch, stream: StepStream) -> Batch:
        """Begin a step: return the records of the batch that take part."""
        ...

    def see(self, factors: Tensor) -> None:
        """Count records by their clipping factors, before weights."""
        ...

    @property
    def count(self) -> int:
        """NOT private: the records counted in this step."""
        ...

    def learn(self, noisy_count: float) -> None:
        """End a step with the count as it was released."""
        ...


@runtime_checkable
class Steered(Protocol):
    """A clipping rule that may bring its own steering."""

    def steering(self, plan: Plan) -> Steering | None:
        """Return the steering of one run, at its start; None if nothing is to be steered."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A plug that remembers something from step to step: checkpoints keep it."""

    def state(self) -> dict[str, Any]:
        """Return what the next step needs, as JSON types; nothing un-noised of private records."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a stored state."""
        ...


@runtime_checkable
class AdaptiveRelease(Release, Protocol):
    """A release that learns from its own noised sums, which costs nothing further."""

    def bind(self, plan: Plan) -> Self:
        """Return the release at the start of a run of the plan."""
        ...

    def process(self, noised: Tensor) -> Tensor:
        """Learn from the noised sum of a step, and return what the loss is given instead of it."""
        ...


class SummedRelease(ABC):
    """A release that sums up by itself, which spares forming every record's contribution.

    The step does not cut what it sums, so a release must say by its class that it is one. Formal
    guarantee asked of it: `total` is the sum of contributions whose absolute values add up to at
    most 1 each, times the shares, as `sum_of_unit_rows` would make it.
    """

    @abstractmethod
    def total(self, outputs: Any, targets: Any, shares: Tensor | None) -> Tensor:
        """Return the sum over the records, float64; `shares` is a factor for each, 1 if None."""
        ...


@dataclass(frozen=True)
class Peek:
    """NOT PRIVATE: what a step saw of its records. Only with `not_private=True`."""

    losses: np.ndarray = field(repr=False)
    norms: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)

    @property
    def non_finite(self) -> int:
        """Number of records whose gradient was not finite, and which therefore counted as zero."""
        return int((~np.isfinite(self.norms)).sum())


@dataclass(frozen=True)
class Randomness:
    """Random numbers of one step besides the gradient's noise.

    The default has a fixed seed for dropout and no noise on a release: NOT private, for research.
    """

    layers: LayerRandomness = field(default_factory=LayerRandomness)
    rule: StepStream | None = None
    release: Callable[[Tensor], Tensor] = lambda total: total


def sum_of_unit_rows(
    contributions: list[Tensor],
    parts: list[slice],
    shape: tuple[int, ...],
    shares: np.ndarray | None = None,
    *,
    absolute: bool = False,
) -> Tensor:
    """Return the sum over all records of their contributions, each cut to length 1, float64.

    Sensitivity 1, or the record's share: a row that is too long is scaled down, one that is not
    finite counts as zero.

    Args:
        contributions: one row per record, micro-batch by micro-batch; none for an empty batch.
        parts: which records each holds.
        shape: that of a row.
        shares: factor of each record after the cut, 1 if not given.
        absolute: cut the sum of absolute values to 1 instead of the length, as Laplace noise needs.
    """
    for rows, part in zip(contributions, parts, strict=True):
        if rows.shape != (part.stop - part.start, *shape):
            raise OwnerwiseError(
                f"a release returned rows of shape {list(rows.shape[1:])}, or not one for each "
                f"record; expected one row of shape {list(shape)} per record: the step itself "
                "cuts, sums and noises them"
            )
    if not contributions:
        return torch.zeros(shape, dtype=torch.float64)
    rows = torch.cat(contributions).to(torch.float64).reshape(-1, math.prod(shape))
    lengths = torch.linalg.vector_norm(rows, ord=1 if absolute else 2, dim=1)
    scale = 1 / lengths.clamp(min=1.0)
    if not math.isfinite(float(lengths.sum())):  # one call in the common case
        scale = torch.where(torch.isfinite(lengths), scale, 0.0)
        rows = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if shares is not None:
        scale = scale * torch.as_tensor(shares, dtype=scale.dtype, device=scale.device)
    return (scale @ rows).reshape(shape)
