"""Devices: where a model computes, and how the records of a batch get there.

The device affects only speed and the last bits of results. The guarantee never depends on it:
batches and noise are drawn on the CPU from the secret stream and then moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches.rows import Part
from ownerwise.torch_internals import pytree

Device = str | torch.device


def device_problems(device: Any) -> list[str]:
    """Return an error message if models cannot be trained on a device; None leaves them alone."""
    if device is None:
        return []
    try:
        torch.zeros(1, dtype=torch.float64, device=device).cpu()  # sums are added in float64
    except Exception as error:
        return [
            f"device={str(device)!r} cannot be used ({str(error).splitlines()[0]}); expected a "
            'device of this machine that computes in float64, such as "cpu" or "cuda"'
        ]
    return []


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters; None if there are none, or if they differ."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


def moved(data: Any, device: torch.device | None, *, pinned: bool = False) -> Any:
    """Return nested data with every tensor on `device`; None leaves all tensors where they are.

    With `pinned`, the copies go through page-locked memory and run in the background.
    """
    if device is None or data is None:
        return data
    plain = type(data) is tuple and all(type(part) is Tensor for part in data)
    if plain and all(part.device == device for part in data):  # by far the most common case
        return data

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Part):
            return replace(leaf, data=moved(leaf.data, device, pinned=pinned))
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        source = leaf.pin_memory() if pinned and leaf.device.type == "cpu" else leaf
        return source.to(device, non_blocking=pinned)

    return pytree.tree_map(move, data)


def moved_ahead(loaded: Iterable[Any], device: torch.device | None) -> Iterator[Any]:
    """Yield nested data on `device`; to a GPU, the next item is copied while one is in use."""
    if device is None or device.type != "cuda":
        for item in loaded:
            yield moved(item, device)
        return
    copies = torch.cuda.Stream(device)
    waiting = None
    for item in loaded:
        with torch.cuda.stream(copies):
            coming = moved(item, device, pinned=True), copies.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = coming
    if waiting is not None:
        yield _arrived(*waiting, device)


def _arrived(item: Any, event: Any, device: torch.device) -> Any:
    """Let the current stream wait until an item has been copied."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(event)
    parts = [leaf.data if isinstance(leaf, Part) else leaf for leaf in pytree.tree_leaves(item)]
    for leaf in pytree.tree_leaves(parts):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)  # its memory must not be reused before it is read
    return item
