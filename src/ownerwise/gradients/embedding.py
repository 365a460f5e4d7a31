"""Look-ups: ``torch.nn.functional.embedding``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import (
    Contribution,
    Saved,
    accumulation_dtype,
    lengths,
    masked,
)
from ownerwise.gradients.grams import gram, squares_from_grams
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.sources import Source

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["Lookup", "embedding"]

# Above this many look-ups per record, equal ids are found by sorting rather than pair by pair.
PAIRWISE_LIMIT = 64


class Lookup(Contribution):
    """``ids``: ``[count, terms]``, ``gradient``: ``[count, terms, columns]``."""

    __slots__ = ("count", "dtype", "gradient", "ids", "shape")

    def __init__(self, ids: Tensor, gradient: Tensor, rows: int) -> None:
        self.ids = ids
        self.gradient = gradient
        self.count = ids.shape[0]
        self.shape = (rows, gradient.shape[2])
        self.dtype = accumulation_dtype(gradient.dtype)

    def gradients(self, start: int, stop: int) -> Tensor:
        """Gradients of the looked-up rows of some records, in the dtype of accumulation."""
        return self.gradient[start:stop].to(self.dtype)

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`: rows looked up twice by one record are added first."""
        gradient = self.gradients(0, self.count)
        if self.ids.shape[1] <= PAIRWISE_LIMIT:
            same = (self.ids[:, :, None] == self.ids[:, None, :]).to(self.dtype)
            return squares_from_grams(gram(gradient), same, lambda i: self.per_record(i, i + 1))
        owner = torch.arange(self.count, device=self.ids.device)
        keys, place = torch.unique(self.ids + owner[:, None] * self.shape[0], return_inverse=True)
        rows = gradient.new_zeros(len(keys), self.shape[1])
        rows.index_add_(0, place.flatten(), gradient.flatten(0, 1))
        squares = gradient.new_zeros(self.count)
        return squares.index_add_(0, keys // self.shape[0], rows.square_().sum(dim=1))

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        rows = self.shape[0]
        shift = rows * torch.arange(stop - start, device=self.ids.device)[:, None]
        full = self.gradient.new_zeros((stop - start) * rows, self.shape[1], dtype=self.dtype)
        full.index_add_(
            0, (self.ids[start:stop] + shift).flatten(), self.gradients(start, stop).flatten(0, 1)
        )
        return full.unflatten(0, (stop - start, rows))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        gradient = self.gradients(0, self.count) * factors[:, None, None]
        full = gradient.new_zeros(self.shape)
        return full.index_add_(0, self.ids.flatten(), gradient.flatten(0, 1))

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.gradient = masked(self.gradient, bad)

    def most(self) -> Tensor:
        """See :class:`Contribution`."""
        return lengths(self.gradient, self.count) * self.ids.shape[1] ** 0.5


def embedding(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rule of ``embedding``; padding rows get no gradient (pitfall 33)."""
    source: Source | None = tape.source(weight)
    if source is None:
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq:
        what = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise Refused(
            f"embedding({source.name})",
            f"{what} makes a record's gradient depend on the other records of the batch",
            f"build the embedding without {what}",
        )
    rows = weight.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    output = functional.embedding(input, source.value, padding_idx)
    saved = Saved(input, f"embedding({source.name})")

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        ids = layout.records(saved.get(), count).reshape(count, -1).long()
        parts = layout.records(gradient, count).reshape(count, ids.shape[1], -1)
        if padding_idx is not None:
            parts = parts.masked_fill((ids == padding_idx)[:, :, None], 0)
        yield source, Lookup(ids, parts, rows)

    return tape.tap(func, output, [source], range(input.dim()), build)
