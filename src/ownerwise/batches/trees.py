"""Nested tuples, lists and dicts of tensors, traversed with `torch.utils._pytree`.

`tests/batches/test_trees.py` tests the behaviour used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.torch_internals import pytree


def as_dicts(data: Any) -> Any:
    """Return nested data with every mapping, such as a BatchEncoding, as a plain dict."""
    if isinstance(data, Mapping):
        return {key: as_dicts(value) for key, value in data.items()}
    if type(data) in (tuple, list):
        return type(data)(map(as_dicts, data))
    return data


def take(data: Any, part: slice | list[int]) -> Any:
    """Return `data` with every tensor reduced to the rows given by `part`."""
    return pytree.tree_map(lambda leaf: _tensor(leaf)[part], data)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Return `data` with `function` applied to every tensor."""
    return pytree.tree_map(lambda leaf: function(_tensor(leaf)), data)


def leaves(data: Any) -> list[Any]:
    """Return everything in `data` that is not a container."""
    return pytree.tree_leaves(data)


def same_tensors(first: Any, second: Any) -> bool:
    """Return True if two collections have equal tensors in every entry; NaNs count as equal."""
    ours, others = leaves(first), leaves(second)
    return len(ours) == len(others) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(ours, others, strict=True)
    )


def row_counts(data: Any) -> set[int]:
    """Return the row counts of all tensors in `data`; a 0-dimensional tensor has 0 rows."""
    plain = type(data) in (tuple, list) and all(type(part) is Tensor for part in data)
    tensors = data if plain else map(_tensor, pytree.tree_leaves(data))  # plain data is common
    return {len(tensor) if tensor.dim() else 0 for tensor in tensors}


def without_rows(data: Any) -> Any:
    """Return `data` with every tensor cut to zero rows; other values are unchanged."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Mapping | list | tuple):  # a type that pytree does not traverse
            _tensor(leaf)
        return leaf[:0] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(cut, data)


def _tensor(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise OwnerwiseError(
            f"a batch contains a {type(leaf).__name__}; expected tensors, or tuples, lists or "
            "dicts of them"
        )
    return leaf
