"""The contribution of one use of a parameter to every record's gradient.

A `Contribution` computes three things from the per-record gradients `g_i` of one use of a
parameter: their squared norms, their weighted sum, and the gradients themselves for a range of
records. The gradients are needed in tests, and for parameters with several uses, whose
contributions must be added before the norm is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ownerwise.gradients.contributions.blocks import (
    BLOCK,
    LONG_BLOCK,
    blocked_sum,
    weighted_sum_of_rows,
)
from ownerwise.gradients.precision import accumulation_dtype, masked, row_norms

__all__ = ["Contribution", "Dense", "few_rows", "sketch_of"]

_AT_ONCE = 1 << 22  # numbers in the gradients that are formed at once for a sketch


def few_rows(weights: Tensor) -> Tensor | None:
    """Return the rows with a nonzero weight if leaving out the others saves work, else None.

    Importance sampling gives most records a weight of 0. Copying the rows with a nonzero weight
    pays off if they are fewer than half of all rows.
    """
    if 2 * int(weights.count_nonzero()) >= len(weights):
        return None
    return weights.nonzero().squeeze(1)


def sketch_of(formed: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of gradients `[records, *shape]` with outer products.

    Args:
        formed: the gradients.
        left, right: the factors of the outer products, `[products, rows]` and `[products,
            columns]`, where the parameter has `rows` rows of `columns` numbers.

    Returns:
        The inner products, `[records, products]`.
    """
    parts = formed.reshape(len(formed), left.shape[1], right.shape[1])
    return ((parts @ right.T.to(parts)) * left.T.to(parts)).sum(dim=1)


class Contribution(ABC):
    """One use of a parameter of shape `shape`, for `count` records."""

    count: int
    shape: tuple[int, ...]

    @property
    def one_term(self) -> bool:
        """Whether a sum over records adds one term for each record, rather than several."""
        return True

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return |g_i|^2, `[count]`."""

    @abstractmethod
    def per_record(self, start: int, stop: int) -> Tensor:
        """Return g_i for a range of records, `[stop - start, *shape]`."""

    def weighted_sum(self, weights: Tensor, *, in_blocks: bool = True) -> Tensor:
        """Return sum_i weights[i] * g_i, `[*shape]`; in float64 for more than one block."""
        if not in_blocks:
            return self.partial_sum(weights, 0, self.count)
        return blocked_sum(
            self.count,
            lambda start, stop: self.partial_sum(weights[start:stop], start, stop),
            BLOCK if self.one_term else LONG_BLOCK,
        )

    @abstractmethod
    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Return the weighted sum over a range of records, with the weights of that range."""

    def sketch(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the inner products of each g_i with outer products; see `sketch_of`."""
        step = max(1, _AT_ONCE // max(1, left.shape[1] * right.shape[1]))
        starts = range(0, self.count, step)
        formed = (self.per_record(start, min(start + step, self.count)) for start in starts)
        return torch.cat([sketch_of(gradients, left, right) for gradients in formed])

    @abstractmethod
    def drop(self, bad: Tensor) -> None:
        """Set g_i to exactly zero where `bad` is true."""

    def terms_bound(self) -> Tensor | None:
        """Return an upper bound on the sum of the norms of each record's terms, `[count]`.

        Return None if sums are computed from stored gradients, because each record then adds only
        one term. Call this after `squared_norms`, which may form the gradients.
        """
        return None


class Dense(Contribution):
    """Per-record gradients that are small enough to store in full, `[count, *shape]`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to(accumulation_dtype(values.dtype))
        self.count = values.shape[0]
        self.shape = tuple(values.shape[1:])

    def squared_norms(self) -> Tensor:
        """See `Contribution`."""
        return row_norms(self.values.reshape(self.count, -1)).square_()

    def per_record(self, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        return self.values[start:stop]

    def weighted_sum(self, weights: Tensor, *, in_blocks: bool = True) -> Tensor:
        """See `Contribution`."""
        if not in_blocks:
            return super().weighted_sum(weights, in_blocks=False)
        return weighted_sum_of_rows(weights, self.values.reshape(self.count, -1)).view(self.shape)

    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        return (weights @ self.values[start:stop].reshape(stop - start, -1)).reshape(self.shape)

    def drop(self, bad: Tensor) -> None:
        """See `Contribution`."""
        self.values = masked(self.values, bad)
