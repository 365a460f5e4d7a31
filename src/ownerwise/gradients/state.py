"""Detect and undo the changes that running a model makes to its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.gradients.calls import call_model, map_tensors
from ownerwise.gradients.tracked_parameters import changed_by_data

__all__ = ["Attributes", "State", "differing", "run_on_dummies"]

_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, submodules, hooks, the mode
_CONTAINERS = (list, dict, set)
_VALUES = (Tensor, float, np.ndarray, np.generic)  # can hold numbers computed from records


class Attributes:
    """The ordinary attributes of a model's modules before a forward pass.

    A forward pass may store values in a module (`self.mean = x.mean(0)`, `self.seen.append(x)`).
    Such values are computed from the records in the batch without noise, so they must not be
    available to the next pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        for module in model.modules():
            slots = vars(module)
            own = {key: value for key, value in slots.items() if key not in _OF_TORCH}
            self._kept.append((slots, own))
            for key, value in own.items():
                if isinstance(value, _CONTAINERS):
                    self._contents.append((value, value.copy()))
                elif isinstance(value, Tensor):
                    self._tensors.append((key, value, value._version))

    def drop_data(self) -> None:
        """Restore changed attributes that now contain a tensor, an array or a float.

        Changes to integers and flags, such as a counter of forward passes, are kept. A tensor that
        was modified in place cannot be restored, so an error is raised.
        """
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise changed_by_data(name)
        self._undo(lambda value: _holds_values(value, 2))

    def restore(self) -> None:
        """Restore all attributes, regardless of their values."""
        self._undo(lambda value: True)
        for slots, own in self._kept:
            slots.update(own)

    def _undo(self, matters: Callable[[Any], bool]) -> None:
        for container, before in self._contents:
            if _replaced(container, before) and matters(container):
                _refill(container, before)
        for slots, own in self._kept:
            for key in [key for key in slots if key not in _OF_TORCH]:
                if (key in own and slots[key] is own[key]) or not matters(slots[key]):
                    continue
                if key in own:
                    slots[key] = own[key]
                else:
                    del slots[key]


class State:
    """A copy of a model's parameters, buffers and attributes, used to detect and undo changes."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._attributes = Attributes(model)
        self._slots = [
            (slots, dict(slots))
            for module in model.modules()
            for slots in (module._parameters, module._buffers, module._modules)
        ]
        self._kept: list[tuple[str, dict[str, Any], str, Tensor, Tensor]] = [
            (f"{prefix}.{key}" if prefix else key, slots, key, tensor, tensor.detach().clone())
            for prefix, module in model.named_modules()
            for slots in (module._parameters, module._buffers)
            for key, tensor in slots.items()
            if tensor is not None
        ]
        self._loose = [(t, t.detach().clone()) for _, t, _ in self._attributes._tensors]

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the changed parameters, buffers and integers, keyed by name."""
        numbers = {
            key: torch.tensor([float(number), place])
            for place, (slots, own) in enumerate(self._attributes._kept)
            for key, number in slots.items()
            if key not in _OF_TORCH and isinstance(number, int) and number is not own.get(key)
        }
        now = ((name, slots.get(key), kept) for name, slots, key, _, kept in self._kept)
        return numbers | {
            name: torch.empty(0) if tensor is None else tensor.detach().clone()
            for name, tensor, kept in now
            if tensor is None or not _same(tensor, kept)
        }

    def restore(self) -> None:
        """Restore all tensors and their values, attributes, submodules and training modes.

        Only tensors that have changed are written to.
        """
        for slots, before in self._slots:
            if _replaced(slots, before):
                _refill(slots, before)
        self._attributes.restore()
        for module, mode in self._modes:
            module.training = mode
        with torch.no_grad():
            for tensor, kept in [(t, kept) for *_, t, kept in self._kept] + self._loose:
                if not _same(tensor, kept):
                    tensor.copy_(kept)


def run_on_dummies(model: nn.Module, inputs: Any, state: State) -> Any:
    """Return the model's outputs for all-zero dummy inputs, and restore the state.

    The zeros have the same shapes and dtypes as the inputs, and nearly every model accepts them as
    numbers, tokens or flags. If a model fails on zeros, it is run on the ACTUAL inputs instead. The
    state is restored in either case, so no trace of the inputs remains in the model, but the
    outputs may then depend on private data.
    """
    try:
        return call_model(model, map_tensors(torch.zeros_like, inputs))
    except Exception:
        state.restore()
        return call_model(model, inputs)
    finally:
        state.restore()


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ between two mappings or are missing from one."""
    both = first.keys() & second.keys()
    return sorted(
        (first.keys() ^ second.keys()) | {n for n in both if not _same(first[n], second[n])}
    )


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether all entries are equal, treating NaNs as equal to each other."""
    if first.shape != second.shape:
        return False
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and torch.allclose(first, second, 0.0, 0.0, equal_nan=True)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradients, then restore every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _holds_values(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return depth > 0 and any(_holds_values(each, depth - 1) for each in value)
    return isinstance(value, _VALUES)


def _replaced(container: Any, before: Any) -> bool:
    """Return whether the objects in a list, dict or set have changed."""
    if len(container) != len(before):
        return True
    if isinstance(container, dict):
        return any(key not in before or before[key] is not container[key] for key in container)
    if isinstance(container, set):
        return container != before
    return any(now is not then for now, then in zip(container, before, strict=True))


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)
