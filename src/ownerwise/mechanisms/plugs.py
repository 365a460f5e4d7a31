"""Base classes for weights, releases and steering in the private step, and their data types."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import LayerRandomness, SecretStream, StepStream

if TYPE_CHECKING:
    from ownerwise.batches import Batch
    from ownerwise.mechanisms.losses import Loss
    from ownerwise.planning import Plan


@dataclass(frozen=True)
class Cells:
    """Contributions to a histogram, in which each record adds one row to a single cell.

    Attributes:
        rows: what each record adds, [records, *shape[1:]].
        index: cell of each record, int64 [records].
    """

    rows: Tensor
    index: Tensor


Contributions = Tensor | Cells


class Plug:
    """A mechanism in the private step, together with its state and its settings.

    By default, a plug has no state, and its settings are the fields of its dataclass.
    """

    @property
    def stateful(self) -> bool:
        """Whether the plug has a state, which checkpoints store."""
        return type(self).state is not Plug.state

    def state(self) -> dict[str, Any]:
        """Return the state for the next step, as JSON types, without any un-noised private data."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state."""

    def settings(self) -> dict[str, Any]:
        """Return the class name and the options, as JSON types."""
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        options = {field.name: getattr(self, field.name) for field in fields}
        simple = {n: v for n, v in options.items() if isinstance(v, bool | int | float | str)}
        return {"kind": type(self).__name__, **simple}

    @classmethod
    def from_settings(cls, **options: Any) -> Self:
        """Create the plug from the options in a configuration file.

        By default, these are the arguments of the class. A class that takes the argument `stream`
        receives the run's own stream if the seed is fixed, and None otherwise.
        """
        return cls(**options)


class Weights(Plug, ABC):
    """Per-record weights in [0, 1] that depend on the whole batch, such as INO.

    Required guarantee: for every batch and record i, the weighted sums of clipped gradients with
    and without i differ by at most the clip norm of i's owner.
    """

    @property
    def private(self) -> bool:
        """Whether the guarantee holds."""
        return True

    def bind(self, plan: Plan) -> Self:
        """Return the weights with the plan's public constants filled in."""
        return self

    @abstractmethod
    def weights(
        self, losses: np.ndarray, clip_norms: np.ndarray, owner_index: np.ndarray
    ) -> np.ndarray:
        """Return one weight per record from the whole batch's losses and clip norms."""

    @abstractmethod
    def score_slack(self, roundoff: float) -> float:
        """Return the maximum change in the weighted sum due to rounding errors in the losses.

        The result is in units of the batch's total clip norm and assumes rounding errors of a few
        times `roundoff`. The step scales contributions down accordingly, unless the plan is
        hardened.
        """


class Release(Plug, ABC):
    """A sum over the batch, such as a histogram, released with noise before the loss is computed.

    The plan must account for it (`release_std`). The step clips every record's contribution to L2
    norm 1 (L1 norm 1 for Laplace noise), adds the contributions and draws the noise. The release
    happens at every step, even for an empty batch; its shape is public.

    Attributes:
        shape: shape of one record's contribution and of the release.
        release_share: default fraction of a step's privacy cost that is spent on the release.
        planned_with: how to make a plan that accounts for the release, as shown in messages.
    """

    shape: tuple[int, ...]
    release_share = 0.1
    planned_with = "ow.plan(..., release_std=)"

    @abstractmethod
    def contributions(self, outputs: Any, targets: Any) -> Contributions:
        """Return one contribution per record, computed from its own outputs and targets.

        It is a tensor of shape [records, *shape] or, if each record contributes to a single index
        of the first dimension, a `Cells` object.
        """

    def bind(self, plan: Plan) -> Self:
        """Return the release in its initial state for a run under the plan."""
        return self

    def process(self, noised: Tensor) -> Tensor:
        """Return the tensor to pass to the loss, given a step's noised sum.

        A release may adapt to its noised sums: this is post-processing and has no privacy cost.
        """
        return noised

    def output_slack(self, roundoff: float) -> float:
        """Return how much rounding of the outputs may change the sum, per record in the batch."""
        return 0.0

    def penalised(self, loss: Loss) -> Loss:
        """Return the loss to train with, which receives the processed release as an argument."""
        return loss

    def measure(self, predicted: np.ndarray, cells: np.ndarray) -> dict[str, float | None]:
        """Return the values that the release measures on evaluation data, by name (NOT private).

        Args:
            predicted: predicted classes.
            cells: second column of the targets.
        """
        return {}

    def record(self) -> dict[str, Any] | None:
        """Return the released values of the last step for the run's history, if any."""
        return None


class Steering(Plug, ABC):
    """Adapts sampling rates and clip norms during a run, based on a noised number at every step.

    The plan accounts for the number (`release_std`), to which each record adds at most 1 in
    absolute value, depending on its own gradient norm, clip norm and clipping factor. Required
    guarantee: `keep_probability` and `clip_scale` depend only on public constants and earlier
    noised numbers, and `keep_probability` is at most 1. Every step then costs at most what the plan
    accounts for: no record is sampled at more than its planned rate, and clip norms and noise are
    scaled together (docs/proofs/dpis.md).
    """

    @property
    @abstractmethod
    def keep_probability(self) -> float:
        """Probability that a drawn record is used, in (0, 1]."""

    @property
    @abstractmethod
    def clip_scale(self) -> float:
        """Factor applied to all clip norms and to the noise."""

    @abstractmethod
    def select(self, batch: Batch, stream: StepStream | None) -> Batch:
        """Start a step: return the part of the batch that is used."""

    @abstractmethod
    def observe(self, norms: Tensor, clip_norms: Tensor, factors: Tensor) -> None:
        """Add up what some of the step's records contribute, before weights are applied.

        Args:
            norms: gradient norms, [records].
            clip_norms: the owners' clip norms in this step, [records].
            factors: the clipping rule's factors, [records].
        """

    @property
    @abstractmethod
    def total(self) -> float:
        """NOT private: the sum of the contributions of this step's records."""

    @abstractmethod
    def update(self, noisy_total: float) -> None:
        """Finish a step, given the released total."""

    def slack_per_record(self, norm_error: float) -> float:
        """Return how much relative errors in the norms may change another record's contribution."""
        return 0.0

    def record(self) -> dict[str, float]:
        """Return released values for the run's history, by name."""
        return {}


@dataclass(frozen=True)
class Peek:
    """NOT PRIVATE: per-record details of a step, available only with `not_private=True`.

    With individual accounting, `active` says which of all records (or owners) still take part after
    the step, in the order of the data.
    """

    losses: np.ndarray = field(repr=False)
    norms: np.ndarray = field(repr=False)
    factors: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)
    active: np.ndarray | None = field(default=None, repr=False)


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
    contributions: list[Contributions],
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
        contributions: one row per record, micro-batch by micro-batch; none for an empty batch.
        parts: the records of each micro-batch.
        shape: shape of a contribution.
        scales: factor applied to each record after clipping; 1 if not given.
        absolute: clip the L1 norm instead of the L2 norm, as Laplace noise requires.
    """
    total = torch.zeros(shape, dtype=torch.float64)
    for found, part in zip(contributions, parts, strict=True):
        of_part = None if scales is None else torch.as_tensor(scales[part])
        rows, cells = (found.rows, found.index) if isinstance(found, Cells) else (found, None)
        expected = shape if cells is None else shape[1:]
        if rows.shape != (part.stop - part.start, *expected):
            raise OwnerwiseError(
                f"a release returned rows of shape {list(rows.shape[1:])}, or the wrong number of "
                f"rows; expected one row of shape {list(expected)} per record. The step itself "
                "clips the rows, sums them and adds the noise"
            )
        clipped = unit_rows(rows, of_part, absolute=absolute)
        if cells is None:
            total += clipped.sum(dim=0).reshape(shape).to(total)
        else:
            summed = clipped.new_zeros(shape[0], clipped.shape[1]).index_add_(0, cells, clipped)
            total += summed.reshape(shape).to(total)
    return total


def unit_rows(rows: Tensor, scales: Tensor | None = None, *, absolute: bool = False) -> Tensor:
    """Return rows clipped to norm 1 and scaled, float64 [records, numbers]; 0 if not finite."""
    flat = rows.to(torch.float64).reshape(len(rows), -1)
    lengths = torch.linalg.vector_norm(flat, ord=1 if absolute else 2, dim=1)
    factors = 1 / lengths.clamp(min=1.0)
    if not math.isfinite(float(lengths.sum())):  # one call in the common case
        factors = torch.where(torch.isfinite(lengths), factors, 0.0)
        flat = flat.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if scales is not None:
        factors = factors * scales.to(factors)
    return flat * factors[:, None]
