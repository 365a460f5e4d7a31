"""The position of the records in a tensor.

A tensor inside a model may have its records along dimension 0, along another dimension (`[time,
record, feature]`), or folded with another dimension (`[record * time, feature]`, in either
order). The shape alone is ambiguous: if there are as many time steps as records, two layouts are
possible. The tape therefore *observes* the layout. It runs backward passes from the losses of parts
of the records, chosen so that every two records are told apart, and keeps a candidate layout only
if the gradient is zero for every record outside the part. If a model mixes records, no candidate
layout remains, and the model is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["WHOLE", "Layout", "candidates", "fits", "keeps_apart"]

Fold = Literal["none", "major", "minor", "whole"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor's records lie: along `dim`, which may be folded with another dimension.

    `none`: index = record; `major`: index = record * inner + other;
    `minor`: index = other * records + record;
    `whole`: the entire tensor belongs to the only record in the batch.
    """

    dim: int
    fold: Fold = "none"

    def records(self, tensor: Tensor, count: int) -> Tensor:
        """View `tensor` as `[count, ...]`; the other dimensions keep their order.

        The remaining part of a folded dimension stays in place.
        """
        dim = self.dim
        if self.fold == "none":
            return tensor if dim == 0 else tensor.movedim(dim, 0)
        if self.fold == "whole":
            return tensor.unsqueeze(0)
        if self.fold == "major":
            return tensor.unflatten(dim, (count, tensor.shape[dim] // count)).movedim(dim, 0)
        return tensor.unflatten(dim, (tensor.shape[dim] // count, count)).movedim(dim + 1, 0)

    def terms(self, tensor: Tensor, count: int) -> Tensor:
        """View `tensor` as `[count, terms, entries]`, keeping its last dimension."""
        parts = self.records(tensor, count)
        return parts.reshape(count, math.prod(parts.shape[1:-1]), parts.shape[-1])

    def inner_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one record's part, given a shape for a batch of one record."""
        if self.fold == "none":
            return shape[: self.dim] + shape[self.dim + 1 :]
        return shape


WHOLE = Layout(0, "whole")


def candidates(shape: tuple[int, ...], count: int, dims: Iterable[int]) -> list[Layout]:
    """Return all layouts of `shape` with records along one of `dims`, most likely first."""
    if count == 1:
        return [WHOLE]
    dims = sorted(d for d in dims if d < len(shape))
    exact = [Layout(d) for d in dims if shape[d] == count]
    folded = [d for d in dims if shape[d] > count and shape[d] % count == 0]
    return exact + [Layout(d, fold) for d in folded for fold in ("major", "minor")]


def fits(layout: Layout, shape: tuple[int, ...], count: int) -> bool:
    """Return whether a layout observed on another batch is possible for this shape."""
    if layout.fold == "none" and layout.dim < len(shape):  # by far the most common case
        return shape[layout.dim] == count
    if layout.fold == "whole":
        return count == 1
    if layout.dim >= len(shape):
        return False
    return shape[layout.dim] % count == 0


def keeps_apart(layout: Layout, gradient: Tensor, kept: Tensor) -> tuple[bool, bool]:
    """Return whether only records in `kept` have nonzero gradients, and whether any of them do.

    Non-finite entries are ignored, because 0 * inf carries no information.
    """
    count = len(kept)
    moved = (gradient != 0) & torch.isfinite(gradient)
    touched = layout.records(moved, count).reshape(count, -1).any(dim=1)
    return not bool((touched & ~kept).any()), bool((touched & kept).any())
