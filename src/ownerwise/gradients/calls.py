"""Torch calls: their names, the tensors among their arguments, and whether they write in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ownerwise.torch_internals import pytree

__all__ = ["Function", "call_model", "map_tensors", "name_of", "tensors_in", "writes_in_place"]

Function = Callable[..., Any]
"""A torch function."""


def name_of(func: Function) -> str:
    """Return the bare name of a torch function."""
    return getattr(func, "__name__", None) or str(func)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return the model's outputs; a dict whose keys are arguments is passed as keywords."""
    if isinstance(inputs, dict) and _takes(model, inputs):
        return model(**inputs)
    return model(inputs)


def _takes(model: nn.Module, keywords: dict[str, Any]) -> bool:
    forward = getattr(model, "_orig_mod", model).forward  # of a compiled model
    try:
        inspect.signature(forward).bind(**keywords)
    except (TypeError, ValueError):
        return False
    return True


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, values)
    return tensors


def map_tensors(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return nested containers with `change` applied to every tensor."""

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, dict):  # a subclass unknown to pytree
            return map_tensors(change, dict(leaf))
        if isinstance(leaf, list | tuple):
            return type(leaf)(map_tensors(change, list(leaf)))
        return leaf

    return pytree.tree_map(change_leaf, values)


def writes_in_place(func: Function) -> bool:
    """Return whether a torch function changes its first argument in place."""
    name = name_of(func)
    return (
        name == "__setitem__"
        or name.startswith("__i")
        or (name.endswith("_") and not name.endswith("__"))
    )
