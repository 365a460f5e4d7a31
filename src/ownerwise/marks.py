"""Marks for results that are not private: anything computed from private records without noise.

A mark states a reason in words, such as "means of the features, from the training records". The
code that computes such a result marks it. The Trainer, the private step and the classifier check
everything they are given for marks, and a run that uses anything marked is NOT PRIVATE.

Marks stay with a module, even if it is inside another module, deep-copied or pickled; with an
object that has an attribute `not_private`, such as a `DataSet` or its `Records`; and with the
memory of an array or tensor: its views and slices, `torch.from_numpy` and `.numpy()`, and Datasets
that contain it. Marks do not carry over to copies of arrays (`X[indices]`, `.float()`,
`.to("cuda")`, files) or to the tensors of a `state_dict` that is loaded elsewhere: pass on the
records themselves (`Records.take`), or state the reason in
`Trainer(..., notes={"not_private": [...]})`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ownerwise.errors import OwnerwiseError

Thing = TypeVar("Thing")
_ATTRIBUTE = "not_private"
_MOST_PARTS = 100  # list entries to examine
_MOST_WORK: Any = 100_000  # for the exact comparison of two strided arrays


@dataclass(frozen=True)
class _Region:
    """A marked region of memory: the addresses from `low` up to `high` on a device."""

    device: str
    low: int
    high: int
    reasons: tuple[str, ...]


_regions: dict[int, _Region] = {}
"""Marked memory regions, keyed by number; a region is removed when its memory is freed."""
_numbers = iter(range(2**63))


def mark(thing: Thing, *reasons: str) -> Thing:
    """Return `thing` (an array, a tensor, a module or another object), marked with reasons."""
    if not reasons:
        return thing
    if isinstance(thing, Tensor | np.ndarray):
        _mark_memory(thing, reasons)
        return thing
    try:
        vars(thing)[_ATTRIBUTE] = tuple(dict.fromkeys([*_own(thing), *reasons]))
    except TypeError:
        raise OwnerwiseError(
            f"a {type(thing).__name__} cannot be marked; expected an array, a tensor, a module or "
            "an object with attributes"
        ) from None
    return thing


def marks_of(*things: Any) -> list[str]:
    """Return the reasons why any of these objects, or any part of them, is marked."""
    return list(dict.fromkeys(_walk(things, set())))


def share_records(one: Any, other: Any) -> bool:
    """Return whether two data sets share memory or use some of the same rows of a Dataset."""
    if one is None or other is None:
        return False
    return any(_overlap(x, y) for x in _held(one) for y in _held(other))


def _walk(thing: Any, seen: set[int]) -> Iterator[str]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor | np.ndarray):
        yield from _reasons_of_memory(thing)
        return
    yield from _own(thing)
    parts: list[Any] = []
    if isinstance(thing, tuple | list):
        parts = list(thing[:_MOST_PARTS])
    elif isinstance(thing, dict):
        parts = list(islice(thing.values(), _MOST_PARTS))
    elif isinstance(thing, nn.Module):
        parts = [*thing.children(), *thing.parameters(recurse=False), *thing.buffers(recurse=False)]
    else:
        parts = _records_arrays(thing)
    if isinstance(thing, nn.Module | Dataset):
        parts += [part for name, part in vars(thing).items() if not name.startswith("_")]
    for part in parts:
        yield from _walk(part, seen)


def _records_arrays(thing: Any) -> list[Any]:
    """Return the arrays of `Records`, which are recognised by their attributes."""
    held = [getattr(thing, name, None) for name in ("inputs", "targets")]
    return [array for array in held if isinstance(array, Tensor | np.ndarray)]


def _own(thing: Any) -> tuple[str, ...]:
    """Return the reasons in the object's `not_private` attribute; a bool is ignored."""
    reasons = getattr(thing, _ATTRIBUTE, ())
    if isinstance(reasons, str):
        return (reasons,) if reasons else ()
    return tuple(map(str, reasons)) if isinstance(reasons, tuple | list) else ()


def _mark_memory(array: Tensor | np.ndarray, reasons: tuple[str, ...]) -> None:
    window = _window(array)
    known = set(_reasons_of_memory(array))
    if window is None or not window.size or known.issuperset(reasons):
        return
    owner = _owner(array)
    number = next(_numbers)
    low, high = np.lib.array_utils.byte_bounds(window)
    _regions[number] = _Region(_device(array), low, high, reasons)
    weakref.finalize(owner, _regions.pop, number, None)


def _reasons_of_memory(array: Tensor | np.ndarray) -> list[str]:
    window = _window(array) if _regions else None
    if window is None or not window.size:
        return []
    low, high = np.lib.array_utils.byte_bounds(window)
    device = _device(array)
    return [
        reason
        for region in list(_regions.values())
        if region.device == device and region.low < high and low < region.high
        for reason in region.reasons
    ]


def _owner(array: Tensor | np.ndarray) -> Any:
    """Return the object that stays alive exactly as long as the array's memory."""
    root = array
    while isinstance(root, np.ndarray) and isinstance(root.base, Tensor | np.ndarray):
        root = root.base
    return root.untyped_storage() if isinstance(root, Tensor) else root


def _device(array: Tensor | np.ndarray) -> str:
    return str(array.device) if isinstance(array, Tensor) else "cpu"


def _window(array: Tensor | np.ndarray) -> np.ndarray | None:
    """Return an array with the same addresses, shape and strides; its contents are never read."""
    if isinstance(array, np.ndarray):
        return array
    if array.layout != torch.strided or array.is_meta:
        return None
    size = array.element_size()
    interface = {
        "data": (array.data_ptr(), True),
        "shape": tuple(array.shape),
        "strides": tuple(size * stride for stride in array.stride()),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _share_memory(one: Tensor | np.ndarray, other: Tensor | np.ndarray) -> bool:
    first, second = _window(one), _window(other)
    if first is None or second is None or _device(one) != _device(other):
        return False
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


def _held(
    data: Any, rows: np.ndarray | None = None, inside: tuple[int, ...] = ()
) -> Iterator[tuple[Any, np.ndarray | None]]:
    """Yield the Datasets and arrays in `data`, each with its selected rows (None for all rows)."""
    parts: list[Any] = []
    if id(data) in inside:  # a Dataset that contains itself
        return
    if isinstance(data, Subset):
        indices = np.asarray(list(data.indices), dtype=np.int64)
        indices %= len(data.dataset) if isinstance(data.dataset, Sized) else 2**63 - 1
        yield from _held(data.dataset, indices if rows is None else indices[rows])
    elif isinstance(data, Tensor | np.ndarray | Dataset):
        yield data, rows
        if isinstance(data, TensorDataset):
            yield from ((tensor, rows) for tensor in data.tensors)
        elif isinstance(data, Dataset) and rows is None:  # else the rows of its parts are unknown
            parts = [part for part in vars(data).values() if _is_part(part, data)]
    elif isinstance(data, tuple | list | dict):
        parts = list(islice(data.values() if isinstance(data, dict) else data, _MOST_PARTS))
    else:
        parts = _records_arrays(data)
    for part in parts:
        yield from _held(part, None, (*inside, id(data)))


def _is_part(part: Any, data: Any) -> bool:
    """Return whether `data` is assumed to use every row of `part`; a shorter Dataset may not."""
    if not isinstance(part, Dataset) or isinstance(data, ConcatDataset):
        return True
    return isinstance(part, Sized) and isinstance(data, Sized) and len(part) == len(data)


def _overlap(one: tuple[Any, np.ndarray | None], other: tuple[Any, np.ndarray | None]) -> bool:
    (first, chosen), (second, taken) = one, other
    if first is second:
        return chosen is None or taken is None or bool(np.isin(chosen, taken).any())
    if not all(isinstance(array, Tensor | np.ndarray) for array in (first, second)):
        return False
    if chosen is None and taken is None:
        return _share_memory(first, second)
    return _device(first) == _device(second) and bool(
        np.isin(_row_addresses(first, chosen), _row_addresses(second, taken)).any()
    )


def _row_addresses(array: Tensor | np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    window = _window(array)
    if window is None or not window.ndim:
        return np.zeros(0, dtype=np.int64)
    rows = np.arange(len(window)) if rows is None else rows
    return window.__array_interface__["data"][0] + rows * window.strides[0]
