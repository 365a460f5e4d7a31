"""Protocols and data types for plug-in weights, releases and steering in the private step."""

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
from ownerwise.randomness import LayerRandomness, SecretStream, StepStream

if TYPE_CHECKING:
    from ownerwise.batches import Batch
    from ownerwise.planning import Plan


class Weights(Protocol):
    """Per-record weights in [0, 1] that depend on the whole batch, such as INO.

    Required guarantee: for every batch and record i, the weighted sums of clipped gradients with
    and without i differ by at most the clip norm of i's owner.
    """

    def bind(self, plan: Plan) -> Self:
        """Return the weights with the plan's public constants filled in."""
        ...

    def weights(
        self, losses: np.ndarray, clip_norms: np.ndarray, owner_index: np.ndarray
    ) -> np.ndarray:
        """Return one weight per record, given the losses and clip norms of the whole batch."""
        ...

    def score_slack(self, roundoff: float) -> float:
        """Return the maximum change in the weighted sum due to rounding errors in the losses.

        The result is in units of the batch's total clip norm and assumes rounding errors of a few
        times `roundoff`. The step scales contributions down accordingly, unless the plan is
        hardened.
        """
        ...


class Release(Protocol):
    """A sum over the batch, such as a histogram, released with noise before the loss is computed.

    The plan must account for the release (`release_std`). Every record's contribution is clipped to
    L2 norm 1 (L1 norm 1 for Laplace noise). The release is made at every step, even for an empty
    batch; its shape is public.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record's contribution and of the release."""
        ...

    def contributions(self, outputs: Any, targets: Any) -> Tensor:
        """Return one contribution per record, computed from that record alone, [records, ...]."""
        ...


class Steering(Protocol):
    """Adapts sampling rates and clip norms during a run, based on a noisy count of records.

    The plan accounts for the count (`release_std`), to which each record adds 0 or 1, depending on
    the record's own clipping factor. Required guarantee: `keep_probability` and `clip_scale` depend
    only on public constants and earlier noisy counts, and `keep_probability` is at most 1. Every
    step then costs at most what the plan accounts for: no record is sampled at more than its
    planned rate, and clip norms and noise are scaled together (docs/proofs/dpis.md).
    """

    @property
    def keep_probability(self) -> float:
        """Probability that a drawn record is used, in (0, 1]."""
        ...

    @property
    def clip_scale(self) -> float:
        """Factor applied to all clip norms and to the noise."""
        ...

    def select(self, batch: Batch, stream: StepStream) -> Batch:
        """Start a step and return the part of the batch to use."""
        ...

    def observe(self, factors: Tensor) -> None:
        """Count records according to their clipping factors, before weights are applied."""
        ...

    @property
    def count(self) -> int:
        """NOT private: the number of records counted in this step."""
        ...

    def update(self, noisy_count: float) -> None:
        """Finish a step, given the released count."""
        ...


@runtime_checkable
class Steered(Protocol):
    """A clipping rule that may provide its own steering."""

    def steering(self, plan: Plan) -> Steering | None:
        """Return the initial steering for one run, or None if nothing is steered."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A plug-in whose state persists from step to step and is stored in checkpoints."""

    def state(self) -> dict[str, Any]:
        """Return the state for the next step as JSON types, without any unnoised private data."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""
        ...


@runtime_checkable
class AdaptiveRelease(Release, Protocol):
    """A release that adapts to its own noised sums.

    This adaptation is post-processing and has no privacy cost.
    """

    def bind(self, plan: Plan) -> Self:
        """Return the release in its initial state for a run under the plan."""
        ...

    def process(self, noised: Tensor) -> Tensor:
        """Update the state from a step's noised sum and return the tensor to pass to the loss."""
        ...


class SummedRelease(ABC):
    """A release that computes its own sum, without materialising each record's contribution.

    The step does not clip such a sum, so a release must subclass this explicitly. Required
    guarantee: `total` equals what `sum_of_unit_rows`, called with the same `scales`, would return
    for contributions whose L1 norms are at most 1.
    """

    @abstractmethod
    def total(self, outputs: Any, targets: Any, scales: Tensor | None) -> Tensor:
        """Return the float64 sum of the contributions, each multiplied by its scale if given."""
        ...


@dataclass(frozen=True)
class Peek:
    """NOT PRIVATE: per-record details of a step, available only with `not_private=True`."""

    losses: np.ndarray = field(repr=False)
    norms: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)


def _fixed_parts() -> StepStream:
    return SecretStream.from_seed(0).child("parts").at_step(0)


@dataclass(frozen=True)
class Randomness:
    """The random numbers for one step, except those for the gradient noise.

    `parts` is used to choose the records on which the step checks that records do not influence
    each other. The default is NOT private and is meant for research: it uses fixed seeds and adds
    no noise to a release.
    """

    layers: LayerRandomness = field(default_factory=LayerRandomness)
    rule: StepStream | None = None
    rows: StepStream | None = None
    parts: StepStream = field(default_factory=_fixed_parts)
    release: Callable[[Tensor], Tensor] = lambda total: total


def sum_of_unit_rows(
    contributions: list[Tensor],
    parts: list[slice],
    shape: tuple[int, ...],
    scales: np.ndarray | None = None,
    *,
    absolute: bool = False,
) -> Tensor:
    """Return the float64 sum of all records' contributions, each clipped to norm 1.

    A record's sensitivity is 1, or its scale if `scales` is given. A row whose norm exceeds 1 is
    scaled down; a row that is not finite counts as zero.

    Args:
        contributions: one tensor per micro-batch, with one row per record; [] for an empty batch.
        parts: the records in each micro-batch.
        shape: shape of a row.
        scales: factor applied to each record's row after clipping; 1 if not given.
        absolute: clip the L1 norm instead of the L2 norm, as Laplace noise requires.
    """
    for rows, part in zip(contributions, parts, strict=True):
        if rows.shape != (part.stop - part.start, *shape):
            raise OwnerwiseError(
                f"a release returned rows of shape {list(rows.shape[1:])}, or the wrong number of "
                f"rows; expected one row of shape {list(shape)} per record. The step itself clips "
                "the rows, sums them and adds the noise"
            )
    if not contributions:
        return torch.zeros(shape, dtype=torch.float64)
    rows = torch.cat(contributions).to(torch.float64).reshape(-1, math.prod(shape))
    lengths = torch.linalg.vector_norm(rows, ord=1 if absolute else 2, dim=1)
    factors = 1 / lengths.clamp(min=1.0)
    if not math.isfinite(float(lengths.sum())):  # one call in the common case
        factors = torch.where(torch.isfinite(lengths), factors, 0.0)
        rows = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if scales is not None:
        factors = factors * torch.as_tensor(scales, dtype=factors.dtype, device=factors.device)
    return (factors @ rows).reshape(shape)
