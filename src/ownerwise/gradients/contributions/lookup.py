"""Rows looked up in a matrix: outer products whose left factors are unit vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ownerwise.gradients.contributions.contribution import Contribution
from ownerwise.gradients.contributions.grams import gram, squares_from_grams
from ownerwise.gradients.precision import accumulation_dtype, lengths, masked

__all__ = ["Lookup"]

# Above this many look-ups per record, equal ids are found by sorting, not by pairwise comparison.
PAIRWISE_LIMIT = 64


class Lookup(Contribution):
    """Look-ups of rows ``ids [count, terms]`` with ``gradient [count, terms, columns]``."""

    __slots__ = ("count", "dtype", "gradient", "ids", "shape")

    def __init__(self, ids: Tensor, gradient: Tensor, rows: int) -> None:
        self.ids = ids
        self.gradient = gradient
        self.count = ids.shape[0]
        self.shape = (rows, gradient.shape[2])
        self.dtype = accumulation_dtype(gradient.dtype)

    def gradients(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the look-ups for a range of records, in the accumulation type."""
        return self.gradient[start:stop].to(self.dtype)

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`; first adds up repeated look-ups of a row within a record."""
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

    @property
    def formed(self) -> bool:
        """See :class:`Contribution`."""
        return self.ids.shape[1] == 1

    def partial_sum(self, factors: Tensor, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        gradient = self.gradients(start, stop) * factors[:, None, None]
        full = gradient.new_zeros(self.shape)
        return full.index_add_(0, self.ids[start:stop].flatten(), gradient.flatten(0, 1))

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.gradient = masked(self.gradient, bad)

    def most(self) -> Tensor:
        """See :class:`Contribution`."""
        return lengths(self.gradient, self.count) * self.ids.shape[1] ** 0.5
