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
    """Look-ups of rows `ids [count, terms]` with `gradient [count, terms, columns]`."""

    def __init__(self, ids: Tensor, gradient: Tensor, rows: int) -> None:
        self.ids = ids
        self.gradient = gradient
        self.count, self.terms = ids.shape
        self.shape = (rows, gradient.shape[2])
        self.dtype = accumulation_dtype(gradient.dtype)

    def left_right(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the ids and the gradients of the look-ups for a range of records."""
        return self.ids[start:stop], self.gradient[start:stop].to(self.dtype)

    def squared_norms(self) -> Tensor:
        """See `Contribution`; first adds up repeated look-ups of a row within a record."""
        ids, gradient = self.left_right(0, self.count)
        if self.terms <= PAIRWISE_LIMIT:
            same = (ids[:, :, None] == ids[:, None, :]).to(self.dtype)
            return squares_from_grams(
                gram(gradient), same, self.shape[1], lambda i: self.per_record(i, i + 1)
            )
        owner = torch.arange(self.count, device=ids.device)
        keys, place = torch.unique(ids + owner[:, None] * self.shape[0], return_inverse=True)
        rows = gradient.new_zeros(len(keys), self.shape[1])
        rows.index_add_(0, place.flatten(), gradient.flatten(0, 1))
        squares = gradient.new_zeros(self.count)
        return squares.index_add_(0, keys // self.shape[0], rows.square_().sum(dim=1))

    def per_record(self, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        (ids, gradient), rows = self.left_right(start, stop), self.shape[0]
        shift = rows * torch.arange(len(ids), device=ids.device)[:, None]
        full = gradient.new_zeros(len(ids) * rows, self.shape[1])
        full.index_add_(0, (ids + shift).flatten(), gradient.flatten(0, 1))
        return full.unflatten(0, (len(ids), rows))

    def sketch(self, left: Tensor, right: Tensor) -> Tensor:
        """See `Contribution`."""
        ids, gradient = self.left_right(0, self.count)
        return ((gradient @ right.T.to(gradient)) * left.T.to(gradient)[ids]).sum(dim=1)

    @property
    def one_term(self) -> bool:
        """See `Contribution`."""
        return self.terms == 1

    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        ids, gradient = self.left_right(start, stop)
        weighted = (gradient * weights[:, None, None]).flatten(0, 1)
        return gradient.new_zeros(self.shape).index_add_(0, ids.flatten(), weighted)

    def drop(self, bad: Tensor) -> None:
        """See `Contribution`."""
        self.gradient = masked(self.gradient, bad)

    def terms_bound(self) -> Tensor:
        """See `Contribution`."""
        return lengths(self.gradient, self.count) * self.terms**0.5
