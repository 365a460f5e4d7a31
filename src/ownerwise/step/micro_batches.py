"""Split a logical batch into micro-batches that fit in memory, without changing the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import take
from ownerwise.gradients import State, run_made_up

_PROBE = 4  # records used to measure the memory per record


def slices(records: int, size: int) -> Iterator[slice]:
    """Yield slices of nearly equal length, with at most `size` records each."""
    count = -(-records // size)
    for number in range(count):
        yield slice(number * records // count, (number + 1) * records // count)


def bytes_per_record(model: nn.Module, inputs: Any, records: int) -> float:
    """Return the number of bytes per record that are stored for the backward pass.

    The number is measured on a few dummy records. Only the shapes of these records come from real
    data, so a layer that initialises itself from its first batch sees no private data. All changes
    to the model are undone, but random layers advance their random generators.
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
        run_made_up(model, probe, state)
    activations = sum(size for pointer, size in stored.items() if pointer not in fixed)
    return activations / count
