"""Rows that belong together: an owner's rows, whose mean gradient is formed before the norm.

If each row's gradient is a sum of outer products, so is the owner's: an owner is a record whose
terms are those of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bucket", "Segments"]

_MOST_PADDING = 4  # rows computed per actual row, before segments are divided by size


class Bucket(NamedTuple):
    """Segments of similar size.

    Attributes:
        members: their numbers.
        shape: (number of members, largest number of rows).
        rows: their rows in a line, short segments repeating their last row; None if these are all
            segments, each with the same number of rows.
        there: False for the repeated rows, `[*shape]`; None if `rows` is.
    """

    members: Tensor
    shape: tuple[int, int]
    rows: Tensor | None = None
    there: Tensor | None = None

    def repeated(self, values: Tensor) -> Tensor:
        """Return `[rows, ...]` values as `[members, largest, ...]`, with repeated rows."""
        if self.rows is not None:
            values = values.index_select(0, self.rows.to(values.device))
        return values.unflatten(0, self.shape)

    def padded(self, values: Tensor) -> Tensor:
        """Return `[rows, ...]` values as `[members, largest, ...]`, with zeros as padding.

        If the last row of a segment is not finite, its padding may be nan.
        """
        found = self.repeated(values)
        if self.there is None:
            return found
        return found.mul_(self.there.view(*self.shape, *[1] * (values.dim() - 1)))

    def parts(self, at_once: int) -> Iterator[Bucket]:
        """Yield buckets of at most `at_once` of these segments."""
        count, largest = self.shape
        if count <= at_once:
            yield self
            return
        rows = torch.arange(count * largest) if self.rows is None else self.rows
        for start in range(0, count, at_once):
            stop = min(start + at_once, count)
            yield Bucket(
                self.members[start:stop],
                (stop - start, largest),
                rows[start * largest : stop * largest],
                None if self.there is None else self.there[start:stop],
            )


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive rows that form one element each, whose gradient is the mean of theirs.

    Attributes:
        sizes: number of rows of each segment, int64 `[count]`, each at least 1.
    """

    sizes: Tensor

    def __post_init__(self):
        if min(self._sizes, default=1) < 1:
            raise ValueError(f"segments of {self._sizes} rows; expected at least 1 each")

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def starts(self) -> Tensor:
        """First row of each segment, int64 `[count]`."""
        return self.sizes.cumsum(0).sub_(self.sizes)

    @cached_property
    def _sizes(self) -> list[int]:  # for small numbers, faster than calls of torch
        return self.sizes.tolist()

    @cached_property
    def rows(self) -> int:
        """Number of rows of all segments."""
        return sum(self._sizes)

    @cached_property
    def ends(self) -> list[int]:
        """First row of each segment, and the number of rows."""
        return [0, *accumulate(self._sizes)]

    @cached_property
    def largest(self) -> int:
        """The largest number of rows of a segment."""
        return max(self._sizes, default=0)

    @property
    def equal(self) -> bool:
        """Whether all segments have the same number of rows."""
        return self.rows == len(self) * self.largest

    @cached_property
    def index(self) -> Tensor:
        """The segment of each row, int64 `[rows]`."""
        return torch.repeat_interleave(self.sizes, output_size=self.rows)

    @cached_property
    def shares(self) -> Tensor:
        """What a row is of its segment, such as 1/8 for one of eight rows, float64 `[rows]`."""
        if self.equal:
            return torch.full((self.rows,), 1 / max(1, self.largest), dtype=torch.float64)
        return self.sizes.double().reciprocal_()[self.index]

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each row's segment, `[rows, ...]`."""
        return values[self.index.to(values.device)]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of each segment's rows, `[count, ...]`, with sums in float64."""
        total = values.new_zeros((len(self), *values.shape[1:]), dtype=torch.float64)
        total.index_add_(0, self.index.to(values.device), values.double())
        return total.to(values.dtype)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of each segment's rows, float64 `[count]`."""
        return np.bincount(self.index.numpy(), weights=values) / self.sizes.numpy()

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All segments, in a single bucket unless that would need far more padding than rows."""
        if len(self) * self.largest <= _MOST_PADDING * self.rows:
            return [self._bucket(torch.arange(len(self)))]
        return list(self._by_size())

    def _by_size(self) -> Iterator[Bucket]:
        classes = (self.sizes - 1).to(torch.float64).add_(0.5).log2_().floor_()  # 1, 2, 3-4, 5-8
        for number in classes.unique():
            yield self._bucket((classes == number).nonzero().flatten())

    def _bucket(self, members: Tensor) -> Bucket:
        whole = len(members) == len(self)
        if whole and self.equal:
            return Bucket(members, (len(self), self.largest))
        sizes, starts = self.sizes[:, None], self.starts[:, None]
        sizes, starts = (sizes, starts) if whole else (sizes[members], starts[members])
        place = torch.arange(self.largest if whole else int(sizes.max()))
        rows = torch.minimum(place, sizes - 1).add_(starts)
        return Bucket(members, (len(members), len(place)), rows.view(-1), place < sizes)
