"""Parts of a logical batch that fit into memory. They change speed, never the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MEMORY_TARGET = 2 << 30
"""Bytes that the activations of one micro-batch may take by default: 2 GiB."""

_PROBE = 4  # records run to see what one costs


def slices(records: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` records, of nearly equal length."""
    count = -(-records // size)
    for number in range(count):
        yield slice(number * records // count, (number + 1) * records // count)


def take(data: Any, part: slice) -> Any:
    """Return the rows `part` of tensors, or of tuples, lists and dicts of them."""
    if isinstance(data, Tensor):
        return data[part]
    if isinstance(data, dict):
        return {key: take(value, part) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(take(value, part) for value in data)
    raise TypeError(
        f"a batch holds a {type(data).__name__}; expected tensors, or tuples, lists or dicts of "
        "them"
    )


def bytes_per_record(model: nn.Module, inputs: Any, records: int) -> float:
    """Return how many bytes the backward pass keeps for one record, seen on a few records."""
    count = min(records, _PROBE)
    probe = take(inputs, slice(0, count))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.random.fork_rng(), torch.enable_grad(), hooks:
        model(probe)
    activations = sum(size for pointer, size in kept.items() if pointer not in parameters)
    return activations / count
