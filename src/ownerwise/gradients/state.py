"""The parameters and buffers of a model, before and after it has run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["State", "differing"]


class State:
    """A copy of the parameters and buffers of a model, to compare with and to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[str, dict[str, Any], str, Tensor, Tensor]] = [
            (f"{prefix}.{key}" if prefix else key, slots, key, tensor, tensor.detach().clone())
            for prefix, module in model.named_modules()
            for slots in (module._parameters, module._buffers)
            for key, tensor in slots.items()
            if tensor is not None
        ]

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers that have changed, by name."""
        now = ((name, slots.get(key), kept) for name, slots, key, _, kept in self._kept)
        return {
            name: torch.empty(0) if tensor is None else tensor.detach().clone()
            for name, tensor, kept in now
            if tensor is None or not _same(tensor, kept)
        }

    def restore(self) -> None:
        """Restore tensors and their values; write only to tensors that have changed."""
        with torch.no_grad():
            for _, slots, key, tensor, kept in self._kept:
                slots[key] = tensor
                if not _same(tensor, kept):
                    tensor.copy_(kept)


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ or appear in only one of the two mappings."""
    both = first.keys() & second.keys()
    return sorted(
        (first.keys() ^ second.keys()) | {n for n in both if not _same(first[n], second[n])}
    )


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether all entries are equal; nan equals nan."""
    if first.shape != second.shape:
        return False
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and torch.allclose(first, second, 0.0, 0.0, equal_nan=True)
