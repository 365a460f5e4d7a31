"""Layers applied to one vector per record: each weight gradient is a single outer product.

The norm is a product of two norms: |g_i| = |left_i| |right_i|. Together with the bias, whose
gradient is ``left_i``, |g_i|^2 = |left_i|^2 (|right_i|^2 + 1).
"""

from __future__ import annotations

from torch import Tensor

from ownerwise.gradients.contributions.blocks import sum_of_outer_products
from ownerwise.gradients.contributions.contribution import Contribution
from ownerwise.gradients.precision import accumulation_dtype, masked, row_norms, without_huge

__all__ = ["RankOne"]


class RankOne(Contribution):
    """One outer product per record: ``left [count, rows]``, ``right [count, columns]``."""

    terms = 1

    def __init__(self, left: Tensor, right: Tensor) -> None:
        dtype = accumulation_dtype(left.dtype)
        self.left, self.right = left.to(dtype), right.to(dtype)
        self.count = left.shape[0]
        self.shape = (left.shape[1], right.shape[1])

    def factors(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the factors of a range of records as ``[records, 1, entries]``."""
        return self.left[start:stop, None], self.right[start:stop, None]

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        left, right = row_norms(self.left), row_norms(self.right)
        return without_huge((left * right).square_(), left, right)

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        return self.left[start:stop, :, None] * self.right[start:stop, None, :]

    def weighted_sum(self, factors: Tensor, *, in_blocks: bool = True) -> Tensor:
        """See :class:`Contribution`."""
        left, right = self._weighted(factors, 0, self.count)
        return sum_of_outer_products(left, right) if in_blocks else left.mT @ right

    def partial_sum(self, factors: Tensor, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        left, right = self._weighted(factors, start, stop)
        return left.mT @ right

    def _weighted(self, factors: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        left, right = self.left[start:stop], self.right[start:stop]
        if self.shape[0] <= self.shape[1]:
            return left * factors[:, None], right
        return left, right * factors[:, None]

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.left, self.right = masked(self.left, bad), masked(self.right, bad)
