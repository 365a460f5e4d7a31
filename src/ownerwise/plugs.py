"""What plugs into the private step: weights over the batch, a release, and what they may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.random import StepStream
from ownerwise.random_layers import LayerRandomness

if TYPE_CHECKING:
    from ownerwise.plans import Plan


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

    The plan must pay for it (`release_std`). Every record's contribution is cut to length 1.
    """

    def contributions(self, outputs: Any, targets: Any) -> Tensor:
        """Return one vector per record, [records, ...], from its own outputs and targets."""
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


def sum_of_unit_rows(contributions: list[Tensor], parts: list[slice]) -> Tensor:
    """Return the sum over all records of their contributions, each cut to length 1, float64.

    Sensitivity 1: a row that is too long is scaled down, one that is not finite counts as zero.
    """
    for rows, part in zip(contributions, parts, strict=True):
        if rows.shape[:1] != (part.stop - part.start,):
            raise OwnerwiseError(
                f"a release returned contributions of shape {list(rows.shape)} for "
                f"{part.stop - part.start} records; expected one row per record: the step itself "
                "cuts, sums and noises them"
            )
    rows = torch.cat(contributions).to(torch.float64)
    lengths = rows.reshape(len(rows), -1).norm(dim=1)
    scale = torch.where(torch.isfinite(lengths), 1 / lengths.clamp(min=1.0), 0.0)
    return torch.tensordot(scale, rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), dims=1)
