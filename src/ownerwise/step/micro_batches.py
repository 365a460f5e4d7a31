"""Micro-batches: parts of a logical batch that fit into memory. They never change the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import take

MEMORY_TARGET = 2 << 30
"""Default memory for the activations of one micro-batch: 2 GiB."""

_PROBE = 4  # records used to measure the memory of one
_ROUND = 16  # rows; kernels run faster on multiples of it


def slices(records: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` records, of nearly equal length."""
    count = -(-records // size)
    for number in range(count):
        yield slice(number * records // count, (number + 1) * records // count)


def blocks(records: int, size: int) -> Iterator[slice]:
    """Yield slices of exactly `size` records; the last one may have fewer."""
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def block_size(expected: float, deviation: float, limit: int) -> int:
    """Return a block size of at most `limit` such that most batches fill few blocks tightly.

    Args:
        expected, deviation: mean and standard deviation of the number of records in a batch. Both
            are public, as the block size must be.
        limit: the most records to compute at once.
    """
    usual = max(1, math.ceil(expected + 2 * deviation))
    even = -(-usual // -(-usual // limit))  # as few blocks as possible, equal
    return min(limit, _ROUND * -(-even // _ROUND))


def padded(data: Any, part: slice, size: int | None) -> Any:
    """Return the rows `part`, padded to `size` rows with copies of the first one."""
    missing = 0 if size is None else size - (part.stop - part.start)
    if missing <= 0:
        return take(data, part)
    return take(data, [*range(part.start, part.stop), *[part.start] * missing])


def bytes_per_record(model: nn.Module, inputs: Any, records: int) -> float:
    """Return how many bytes the backward pass stores per record, measured on a few records.

    Runs the model, so random layers advance their generator.
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
    with torch.enable_grad(), hooks:
        model(probe)
    activations = sum(size for pointer, size in stored.items() if pointer not in fixed)
    return activations / count
