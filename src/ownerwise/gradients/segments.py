"""Rows that belong together: an owner's rows, whose gradients are added before the norm is taken.

The gradient of an owner is the sum of the gradients of their rows. If each row's gradient is a sum
of outer products, so is the owner's: an owner is a record whose terms are those of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bucket", "Segments"]

_MOST_PADDING = 4  # rows computed per actual row, before segments are divided by size


class Bucket(NamedTuple):
    """Segments of similar size.

    Attributes:
        members: their numbers.
        rows: their rows, `[members, largest]`; short segments repeat a row.
        there: False for the repeated rows.
        full: whether these are all segments, each with the same number of rows.
    """

    members: Tensor
    rows: Tensor
    there: Tensor
    full: bool = False

    def padded(self, values: Tensor) -> Tensor:
        """Return `[rows, ...]` values as `[members, largest, ...]`, with zeros as padding."""
        if self.full:
            return values.unflatten(0, self.rows.shape)
        there = self.there.reshape(*self.there.shape, *[1] * (values.dim() - 1))
        return torch.where(there, values[self.rows], 0)


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive rows that form one element each.

    Attributes:
        index: the segment of each row, int64 `[rows]`, non-decreasing; none is empty.
        count: number of segments.
    """

    index: Tensor
    count: int

    def __post_init__(self):
        steps = self.index.diff()
        fits = bool(((steps == 0) | (steps == 1)).all()) and len(self.index) >= self.count
        ends = (0, self.count - 1) if self.count else ()
        if not fits or tuple(self.index[[0, -1]].tolist() if len(self.index) else ()) != ends:
            raise ValueError(
                f"segments of {len(self.index)} rows; expected non-decreasing numbers that cover "
                f"0 to {self.count - 1}"
            )

    def __len__(self) -> int:
        return self.count

    @cached_property
    def sizes(self) -> Tensor:
        """Number of rows of each segment, `[count]`."""
        return torch.bincount(self.index, minlength=self.count)

    @cached_property
    def ends(self) -> list[int]:
        """First row of each segment, and the number of rows."""
        return [0, *self.sizes.cumsum(0).tolist()]

    @cached_property
    def largest(self) -> int:
        """The largest number of rows of a segment."""
        return int(self.sizes.max()) if self.count else 0

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each row's segment, `[rows, ...]`."""
        return values[self.index.to(values.device)]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of each segment's rows, `[count, ...]`, with sums in float64."""
        total = values.new_zeros((self.count, *values.shape[1:]), dtype=torch.float64)
        total.index_add_(0, self.index.to(values.device), values.double())
        return total.to(values.dtype)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All segments, in a single bucket unless that would need far more padding than rows."""
        if self.count * self.largest <= _MOST_PADDING * len(self.index):
            return [self._bucket(torch.arange(self.count))]
        return list(self._by_size())

    def _by_size(self) -> Iterator[Bucket]:
        classes = (self.sizes - 1).to(torch.float64).add_(0.5).log2_().floor_()  # 1, 2, 3-4, 5-8
        for number in classes.unique():
            yield self._bucket((classes == number).nonzero().flatten())

    def _bucket(self, members: Tensor) -> Bucket:
        sizes = self.sizes[members][:, None]
        first = (self.sizes.cumsum(0) - self.sizes)[members][:, None]
        place = torch.arange(int(sizes.max()) if len(members) else 0)
        full = self.count * len(place) == len(self.index)
        return Bucket(members, first + place.minimum(sizes - 1), place < sizes, full)
