"""Split a logical batch into micro-batches that fit in memory, without changing the result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import take
from ownerwise.gradients import Chain, Segments, State, run_on_dummies
from ownerwise.gradients.calls import tensors_in
from ownerwise.step.loss_separation import LossCheck
from ownerwise.step.performance import Performance
from ownerwise.step.secret_rows import Rows

_PROBE = 4  # records used to measure the memory per record


@dataclass
class MicroBatch:
    """Rows that are computed together, and what the current pass has computed from them.

    Attributes:
        number: position among the micro-batches.
        rows: the rows of the batch.
        elements: its elements: the same as the rows, or owners with several rows each.
        segments: the rows of each element; None if every row is an element.
        inputs, targets: their data.
        outputs, losses: results of the model and the loss.
        chain: the pass through a chain of vector layers; None for a model that needs the tape.
        check: the loss check, begun before the losses were computed.
        seen: losses, norms and factors, for `peek`.
    """

    number: int
    rows: slice
    elements: slice
    inputs: Any
    targets: Any
    segments: Segments | None = None
    outputs: Any = None
    losses: Tensor | None = None
    chain: Chain | None = None
    check: LossCheck | None = None
    seen: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    def output_tensors(self) -> list[Tensor]:
        """Return all tensors in the outputs."""
        return tensors_in(self.outputs) if self.chain is None else [self.outputs]


class Split:
    """Splits batches into micro-batches, whose size follows from the memory that a record needs.

    Args:
        model: the model.
        performance: the micro-batch size, or the memory target.
    """

    def __init__(self, model: nn.Module, performance: Performance):
        self._model = model
        self._performance = performance
        self._bytes_per_record: float | None = None

    def __call__(self, rows: Rows) -> list[MicroBatch]:
        """Return the rows of a batch in parts that fit in memory."""
        size = self._size(rows)
        if rows.segments is not None:
            return _whole_elements(rows, rows.segments, size)
        spans = list(slices(len(rows), size))
        if len(spans) == 1:
            return [MicroBatch(0, spans[0], spans[0], rows.inputs, rows.targets)]
        return [
            MicroBatch(number, span, span, take(rows.inputs, span), take(rows.targets, span))
            for number, span in enumerate(spans)
        ]

    def _size(self, rows: Rows) -> int:
        if self._performance.micro_batch_size is not None:
            return self._performance.micro_batch_size
        if self._bytes_per_record is None:
            self._bytes_per_record = bytes_per_record(self._model, rows.inputs, len(rows))
        return max(1, int(self._performance.memory_target // max(1.0, self._bytes_per_record)))


def _whole_elements(rows: Rows, segments: Segments, size: int) -> list[MicroBatch]:
    """Return micro-batches of about `size` rows that split no element; a large one is alone."""
    if len(rows) <= size:
        everything = slice(0, len(rows)), slice(0, len(segments))
        return [MicroBatch(0, *everything, rows.inputs, rows.targets, segments)]
    ends = segments.ends
    result: list[MicroBatch] = []
    first = 0
    while first < len(segments):
        last = max(first + 1, bisect_right(ends, ends[first] + size) - 1)
        numbers = list(range(ends[first], ends[last]))
        result.append(
            MicroBatch(
                len(result),
                slice(numbers[0], numbers[-1] + 1),
                slice(first, last),
                take(rows.inputs, numbers),  # a copy: kernels round by a view's alignment
                take(rows.targets, numbers),
                Segments(segments.sizes[first:last]),
            )
        )
        first = last
    return result


def slices(records: int, size: int) -> Iterator[slice]:
    """Yield slices of nearly equal length, with at most `size` records each."""
    count = -(-records // size)
    for number in range(count):
        yield slice(number * records // count, (number + 1) * records // count)


def bytes_per_record(model: nn.Module, inputs: Any, records: int) -> float:
    """Return the number of bytes per record that are stored for the backward pass.

    The number is measured on a few dummy records, which share only their shapes with real ones, or
    on real records if the model fails on dummies. Either way, all changes to the model are undone,
    so a layer that initialises itself from its first batch keeps no private data. Random layers
    advance their random generators.
    """
    count = min(records, _PROBE)
    probe = take(inputs, list(range(count)))  # a copy: a view would count the whole batch
    stored: dict[int, int] = {}  # bytes by address

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    shared = [*model.parameters(), *model.buffers()]
    fixed = {tensor.untyped_storage().data_ptr() for tensor in shared}
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    state = State(model)
    with torch.enable_grad(), hooks:
        run_on_dummies(model, probe, state)
    activations = sum(size for pointer, size in stored.items() if pointer not in fixed)
    return activations / count
