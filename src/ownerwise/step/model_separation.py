"""Use trial runs to check that a model's results for a record do not depend on other records.

A check of the loss alone cannot detect a model that mixes records, for example through batch
statistics, attention over the first dimension, or initialisation from the first batch. At steps 0,
1, 2, 4, 8, ... the model therefore runs on records chosen secretly at random from the batch, and
again on each half of them, before the step itself runs. A record's outputs must be the same in both
runs, up to a relative error of 0.01 / (number of records in the batch). Where float32 is not
precise enough, the outputs of a float64 copy of the model are compared. The model's state is
restored, so no change made by a trial run survives. The norms of the gradients are compared in the
same way, because hooks and autograd functions can mix records in the backward pass alone.

A `collate` function that pads to the longest record in a batch is checked at every step
(`Batch.part`): records that were collated separately must have the same losses as in the whole
batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import Batch, take
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import State, Tape, changed_by_data, differing
from ownerwise.gradients.calls import tensors_in
from ownerwise.randomness import StepStream, kept_generators, random_order
from ownerwise.step.checks import inputs_and_targets
from ownerwise.step.separation import ROOM, agree_in_float64, in_float64, rows_agree

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


def check_model(model: nn.Module, batch: Batch, stream: StepStream) -> None:
    """Reject a model in which a record's output, or the model's state, depends on other records.

    Args:
        model: the model; its state is restored.
        batch: the batch, with two or more records.
        stream: secret random numbers used to choose the records.
    """
    inputs, _ = inputs_and_targets(batch)
    rows = random_order(stream, len(batch))[:_MOST_RECORDS].tolist()
    share = ROOM / len(batch)
    with kept_generators():
        _check_outputs(model, inputs, rows, share)
        _check_gradients(model, inputs, rows[:_MOST_GRADIENTS], share, stream)


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

    def exact() -> tuple[list[Tensor], list[Tensor]]:
        double = copy.deepcopy(model).double()
        return _runs(double, _outputs(in_float64(inputs)), rows, check_state=False)

    with torch.no_grad():
        pair = _runs(model, _outputs(inputs), rows, check_state=True)
        roundings = _ROUNDINGS * _machine_epsilon(pair[0])
        if not _same_outputs(*pair, share) and not agree_in_float64(
            _same_outputs, pair, exact, share,
            rounded=max(_MOST_IN_FLOAT32, roundings),
            fallback=max(_SHARE_IN_FLOAT32, roundings),
        ):  # fmt: skip
            raise OwnerwiseError(
                "the output of a record changes with the other records in its batch, so its "
                "influence cannot be bounded: make the model treat each record separately (no "
                "statistics over dimension 0, one output row per record, randomness only from "
                "torch)"
            )


def _check_gradients(
    model: nn.Module, inputs: Any, rows: list[int], share: float, stream: StepStream
) -> None:
    """Reject a model in which a record's gradient depends on other records.

    A hook or an autograd function can mix records in the backward pass alone. For each
    record, the check uses a loss that is linear in the record's outputs and multiplied by a secret
    factor. The norm of a record's gradient must not depend on the other records.
    """
    factors = np.exp2(8 * stream.uniforms(max(rows) + 1) - 4)
    pair = _runs(model, _gradient_norms(inputs, factors), rows, check_state=False)
    if _same_outputs(*pair, share):
        return
    try:
        double = copy.deepcopy(model).double()
        pair = _runs(double, _gradient_norms(in_float64(inputs), factors), rows, check_state=False)
        same = _same_outputs(*pair, share)
    except Exception:  # in the model's own precision, single records may differ more
        room = max(_MOST_IN_FLOAT32, _ROUNDINGS * _machine_epsilon(pair[0]))
        agreeing = [
            _same_outputs([first[at : at + 1]], [second[at : at + 1]], room)
            for first, second in zip(*pair, strict=True)
            for at in range(len(first))
        ]
        same = 8 * sum(agreeing) >= 7 * len(agreeing)
    if not same:
        raise OwnerwiseError(
            "the gradient of a record changes with the other records in its batch, so its "
            "influence cannot be bounded: make hooks and autograd functions in the model treat "
            "each record separately (no norm, maximum or mean over dimension 0)"
        )


Compute = Callable[[nn.Module, list[int]], list[Tensor]]


def _outputs(inputs: Any) -> Compute:
    """Return a function that computes the outputs for some rows of the inputs."""
    return lambda model, rows: [t.clone() for t in tensors_in(model(take(inputs, rows)))]


def _gradient_norms(inputs: Any, factors: np.ndarray) -> Compute:
    """Return a function that computes the norms of gradients for some rows of the inputs."""

    def compute(model: nn.Module, rows: list[int]) -> list[Tensor]:
        with torch.enable_grad():
            tape = Tape(model)
            with tape:
                outputs = model(take(inputs, rows))
            losses: Tensor | None = None
            for output in tensors_in(outputs):
                if not output.requires_grad or not output.dim() or len(output) != len(rows):
                    continue
                flat = output.flatten(1) if output.dim() > 1 else output[:, None]
                numbers = torch.Generator().manual_seed(flat.shape[1])
                coefficients = torch.randn(flat.shape[1], generator=numbers).to(flat)
                values = flat @ coefficients
                losses = values if losses is None else losses + values
            if losses is None:
                return []
            return [tape.backward(losses * torch.as_tensor(factors[rows]).to(losses)).norms]

    return compute


def _runs(
    model: nn.Module, compute: Compute, rows: list[int], *, check_state: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results for all rows together, and those for the odd and even rows separately.

    The rows of each half are in reverse order. A model that draws random numbers (dropout) must
    draw the same masks, so it runs on the same number of rows instead, with copies of one half in
    place of the other.

    Example: for the rows a b c d, the model runs on a b c d, then on c a, then on d b. The function
    returns the results for a c and b d from the first run, and for a c and b d from the other two.
    With dropout, the other runs are on a a c c and b b d d.
    """
    state = State(model)

    def run(rows: list[int]) -> tuple[list[Tensor], dict[str, Tensor], bool]:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        try:
            results = compute(model, rows)
            return results, state.changed(), not torch.equal(before, torch.get_rng_state())
        finally:
            state.restore()

    count = len(rows)
    together, after_all, random = run(rows)
    first: list[Tensor] = []
    second: list[Tensor] = []
    for parity in (0, 1):
        half = list(range(parity, count, 2))
        others = half[::-1]
        if random:
            others = [half[min(place // 2, len(half) - 1)] for place in range(count)]
        apart, after_half, _ = run([rows[place] for place in others])
        if check_state:
            for name in differing(after_all, after_half):
                raise changed_by_data(name)
        for one, other in zip(together, apart, strict=True):
            by_row = one.dim() > 0 and len(one) == count and len(other) == len(others)
            first.append(one[half] if by_row else one)
            second.append((other[half] if random else other.flip(0)) if by_row else other)
    return first, second


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
        if not _close(*pair, share) and not agree_in_float64(
            _close, pair, exact, share,
            rounded=math.inf,
            fallback=max(_SHARE_IN_FLOAT32, _ROUNDINGS * _machine_epsilon(pair[0])),
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


def _same_outputs(first: list[Tensor], second: list[Tensor], share: float) -> bool:
    return len(first) == len(second) and all(
        one.shape == other.shape and _close(one, other, share)
        for one, other in zip(first, second, strict=True)
    )


def _close(first: Tensor, second: Tensor, share: float) -> bool:
    """Return True if no row differs by more than a fraction `share` of its own norm."""
    count = len(first) if first.dim() else 1
    first, second = first.double().reshape(count, -1), second.double().reshape(count, -1)
    sizes = torch.linalg.vector_norm(first, dim=1).nan_to_num(0.0, 0.0, 0.0)
    return rows_agree(first, second, share * (sizes + 1e-3))


def _machine_epsilon(outputs: Any) -> float:
    kinds = [tensor.dtype for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)
