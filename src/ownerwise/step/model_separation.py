"""Use trial runs to check that a model's results for a record do not depend on other records.

A check of the loss alone cannot detect a model that mixes records, for example through batch
statistics, attention over the first dimension, or initialisation from the first batch. At steps 0,
1, 2, 4, 8, ... the model therefore runs on records chosen secretly at random from the batch, and
again on each half of them, before the step itself runs. A record's outputs must be the same in both
runs, up to a relative error of 0.01 / (number of records in the batch). Where float32 is not
precise enough, the outputs of a float64 copy of the model are compared. The model's state is
restored, so no change made by a trial run survives. The gradients are compared in a similar way
(`gradient_separation`), because hooks and autograd functions can mix records in the backward pass
alone, and because a record's place in the batch may decide which parameters it reaches while these
are still equal, as in a table that starts at zero.

A `collate` function that pads to the longest record in a batch is checked at every step
(`Batch.part`): records that were collated separately must have the same losses as in the whole
batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import Batch, take
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import State, Tape, changed_by_data
from ownerwise.gradients.calls import call_model, tensors_in
from ownerwise.gradients.separation import (
    Trial,
    close,
    in_float64,
    machine_epsilon,
    separate,
)
from ownerwise.randomness import StepStream, kept_generators, random_order
from ownerwise.step.checks import inputs_and_targets
from ownerwise.step.gradient_separation import check_gradients
from ownerwise.step.separation import ROOM

_MOST_RECORDS = 128  # records in a trial run
_MOST_GRADIENTS = 32  # records in a trial run with a backward pass
_SHARE_IN_FLOAT32 = 1e-3  # for models that cannot run in float64
_MOST_IN_FLOAT32 = 1e-2  # for models that agree in float64
_ROUNDINGS = 8  # for models with less precise outputs
_PUBLIC_LENGTH = "pad to a fixed, public length (max_length=)"

Losses = Callable[..., Tensor]


def is_due(earlier: int) -> bool:
    """Return whether to check the model after `earlier` batches: True after 0, 1, 2, 4, 8, ...

    Only batches with two or more records count.
    """
    return (earlier & (earlier - 1)) == 0  # zero or a power of two


def check_model(model: nn.Module, tape: Tape, batch: Batch, stream: StepStream) -> None:
    """Reject a model in which a record's output, or the model's state, depends on other records.

    Args:
        model: the model; its state is restored.
        tape: the model's tape, which learns where the records lie.
        batch: the batch, with two or more records.
        stream: secret random numbers used to choose the records.
    """
    inputs, _ = inputs_and_targets(batch)
    rows = random_order(stream, len(batch))[:_MOST_RECORDS].tolist()
    share = ROOM / len(batch)
    with kept_generators():
        _check_outputs(model, inputs, rows, share)
        rows = rows[:_MOST_GRADIENTS]
        check_gradients(model, tape, take(inputs, rows), len(rows), share, stream)


def check_outputs(
    model: nn.Module, inputs: Any, count: int, share: float, stream: StepStream
) -> None:
    """Reject a model whose output for one of `count` records depends on the other records.

    `share` is the largest change that is allowed, relative to the output.
    """
    rows = random_order(stream, count)[:_MOST_RECORDS].tolist()
    with kept_generators():
        _check_outputs(model, inputs, rows, share)


def _check_outputs(model: nn.Module, inputs: Any, rows: list[int], share: float) -> None:
    """Reject a model in which a record's output, or the model's state, depends on other records."""
    trial = Trial(lambda rows: (take(inputs, rows),), _outputs, rows)
    with torch.no_grad():
        runs = trial.run(model)
        for name in runs.changed:
            raise changed_by_data(name)
        roundings = _ROUNDINGS * machine_epsilon(runs.together)
        if not trial.outputs_agree(
            model, runs, share,
            rounded=max(_MOST_IN_FLOAT32, roundings),
            fallback=max(_SHARE_IN_FLOAT32, roundings),
        ):  # fmt: skip
            raise OwnerwiseError(
                "the output of a record changes with the other records in its batch, so its "
                "influence cannot be bounded: make the model treat each record separately (no "
                "statistics over dimension 0, one output row per record, randomness only from "
                "torch)"
            )


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_in(call_model(model, inputs))]


def check_part(
    model: nn.Module, losses: Losses, batch: Batch, released: Any, *, fixed_shapes: bool
) -> None:
    """Reject a `collate` function that makes a record depend on other records in its batch.

    Args:
        model: the model; its state is restored.
        losses: one loss per record.
        batch: the batch, with a part that was collated separately.
        released: extra arguments for the loss.
        fixed_shapes: whether the shapes of rows must be public, as hardened plans require.
    """
    part = batch.part
    if part is None:
        return
    within = take(batch.data, part.positions.tolist())
    shapes = [[tensor.shape for tensor in tensors_in(data)] for data in (within, part.data)]
    if shapes[0] == shapes[1]:
        if part.random:
            return
        raise OwnerwiseError(
            "collate changes a record depending on the other records in its batch, so the record's "
            "influence cannot be bounded: collate must only stack and pad"
        )
    if fixed_shapes:
        raise OwnerwiseError(
            "the shapes of a batch depend on its records, but a hardened plan needs public shapes: "
            f"{_PUBLIC_LENGTH}"
        )
    if part.random:
        raise OwnerwiseError(
            "collate draws random numbers, and the shapes it returns depend on the records, so the "
            f"step cannot verify that no record depends on the padding: {_PUBLIC_LENGTH}, or draw "
            "the numbers in the Dataset"
        )
    share = ROOM / len(batch)

    def exact() -> tuple[Tensor, Tensor]:
        double = copy.deepcopy(model).double()
        extra = in_float64(released)
        return (
            _losses(double, losses, in_float64(within), extra),
            _losses(double, losses, in_float64(part.data), extra),
        )

    with kept_generators(), torch.no_grad():
        pair = (
            _losses(model, losses, within, released),
            _losses(model, losses, part.data, released),
        )
        if not separate(
            close, pair, exact, share,
            rounded=math.inf,
            fallback=max(_SHARE_IN_FLOAT32, _ROUNDINGS * machine_epsilon(pair[0])),
        ):  # fmt: skip
            raise OwnerwiseError(
                "the loss of a record changes with the padding of its batch, and the longest "
                "record in the batch determines the padding, so that record's influence cannot be "
                f"bounded: {_PUBLIC_LENGTH}, or make the model and loss ignore padding"
            )


def _losses(model: nn.Module, losses: Losses, data: Any, released: Any) -> Tensor:
    state = State(model)
    try:
        model.eval()  # dropout masks cannot be the same for two lengths
        return losses(model(data[0]), data[1], *released).clone()
    finally:
        state.restore()
