"""Layers that see one vector per record: one outer product each, and no sum.

The norm is a product of two norms: |g_i| = |left_i| |right_i|; with the bias, whose gradient is
``left_i``, |g_i|^2 = |left_i|^2 (|right_i|^2 + 1). In small networks the number of calls is what
costs time, so a :class:`Bank` does all such layers of a network together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ownerwise.gradients.contributions import Contribution, Dense, accumulation_dtype, masked
from ownerwise.gradients.precision import without_huge
from ownerwise.gradients.sources import Source

__all__ = ["Bank", "RankOne"]


class RankOne(Contribution):
    """One outer product per record: ``left [count, rows]``, ``right [count, columns]``."""

    __slots__ = ("count", "dtype", "left", "right", "shape")

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.dtype = accumulation_dtype(left.dtype)
        self.left, self.right = left.to(self.dtype), right.to(self.dtype)
        self.count = left.shape[0]
        self.shape = (left.shape[1], right.shape[1])

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`."""
        norm = torch.linalg.vector_norm
        left, right = norm(self.left, dim=1), norm(self.right, dim=1)
        return without_huge((left * right).square_(), left, right)

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        return self.left[start:stop, :, None] * self.right[start:stop, None, :]

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        if self.shape[0] <= self.shape[1]:
            return (self.left * factors[:, None]).mT @ self.right
        return self.left.mT @ (self.right * factors[:, None])

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        self.left, self.right = masked(self.left, bad), masked(self.right, bad)


class Bank:
    """All vector layers of a network, side by side: ``[count, sum of widths]``."""

    LIMIT = 1 << 20  # floats; beyond, copying costs more than the calls it spares

    def __init__(
        self,
        weights: Sequence[tuple[Source, RankOne]],
        biases: dict[int, tuple[Source, Dense]],
        shelf: dict[object, Tensor],
    ) -> None:
        self.weights = weights
        self.biases = [biases.get(id(use)) for _, use in weights]
        self.right = [use.right for _, use in weights]
        self.both = torch.cat([*[use.left for _, use in weights], *self.right], dim=1)
        self.widths = [use.shape[0] for _, use in weights]
        self._shelf = shelf

    @staticmethod
    def suits(weights: Sequence[tuple[Source, RankOne]]) -> bool:
        """Whether the layers are of one type, and small enough."""
        size = sum(use.left.numel() + use.right.numel() for _, use in weights)
        return size <= Bank.LIMIT and len({use.dtype for _, use in weights}) == 1

    def squared_norms(self) -> Tensor:
        """``[count]``: of all weights and biases together."""
        layers = len(self.weights)
        squares = self._indicator() @ self.both.square().t()
        left, right = squares[:layers], squares[layers:]
        add = [float(bias is not None) for bias in self.biases]
        if all(add):
            right += 1
        elif any(add):
            right += right.new_tensor(add)[:, None]
        return without_huge((left * right).sum(dim=0), squares.sqrt_())

    def _indicator(self) -> Tensor:
        """``[2 * layers, columns]``: one where the column belongs to the left, right factor."""
        widths = [*self.widths, *[right.shape[1] for right in self.right]]
        key = (tuple(widths), self.both.dtype, self.both.device)
        found = self._shelf.get(key)
        if found is None:
            columns = torch.repeat_interleave(torch.tensor(widths))
            found = torch.nn.functional.one_hot(columns, len(widths)).t().to(self.both)
            found = self._shelf[key] = found.contiguous()
        return found

    def weighted_sums(self, factors: Tensor) -> list[tuple[Source, Tensor]]:
        """``sum_i factors[i] * g_i`` of every weight and bias."""
        scaled = self.both[:, : sum(self.widths)] * factors[:, None]
        total = scaled.sum(dim=0)
        sums, start = [], 0
        pairs = zip(self.weights, self.biases, self.right, self.widths, strict=True)
        for (source, _), bias, right, width in pairs:
            sums.append((source, scaled[:, start : start + width].mT @ right))
            if bias is not None:
                sums.append((bias[0], total[start : start + width].clone()))
            start += width
        return sums

    def drop(self, bad: Tensor) -> None:
        """Make g_i exactly zero where ``bad`` is true."""
        self.both = masked(self.both, bad)
        self.right = [masked(right, bad) for right in self.right]
