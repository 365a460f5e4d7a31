"""Gradients that are sums of outer products: ``g_i = sum_t left[i, t] (x) right[i, t]``.

Every use of a matrix has this form: linear layers (left = gradient of the output, right = input),
recurrent weights, attention projections. With T terms, O rows and I columns, a record's norm
costs ``T^2 (O + I)`` through Gram matrices ("ghost norm": |g_i|^2 = sum_st <left_s, left_t>
<right_s, right_t>) and ``T O I`` by forming the gradient. If these gradients can be kept in
memory, the weighted sum is a matrix-vector product; otherwise it costs another ``T O I`` per
record.

References: Goodfellow 2015 (T = 1); Li et al. 2022, "Large language models can be strong
differentially private learners" (ghost norm); Bu et al. 2023, "Differentially private optimization
on large model at small cost" (book-keeping, choice per layer).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ownerwise.gradients.contributions.contribution import Contribution, few_rows
from ownerwise.gradients.contributions.grams import gram, squares_from_grams
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import (
    accumulation_dtype,
    lengths,
    masked,
    row_norms,
    without_huge,
)
from ownerwise.gradients.workspace import Loan

__all__ = ["Outer", "SharedLeft", "Way", "choose"]

# The cost of one float of a held gradient (one write, one read for the norm, one read for the sum),
# in multiply-adds of a large matrix product: estimates for two cores, AVX-512 and 48 MB of cache.
TRAFFIC_IN_CACHE, TRAFFIC, CACHE_BYTES = 20, 110, 32 << 20
# A rough factor by which multiply-adds of Gram matrices, which are small, are slower.
GRAM = 1.5

Way = str  # "ghost", "form" (and discard) or "hold"


def choose(
    budget: MemoryBudget, count: int, terms: int, rows: int, columns: int, saved: int
) -> Way:
    """Return the cheapest method that fits in memory; storing gradients frees ``saved`` bytes."""
    form = terms * rows * columns
    ghost = GRAM * terms * terms * (rows + columns)
    size = 4 * count * rows * columns
    traffic = (TRAFFIC_IN_CACHE if size < CACHE_BYTES else TRAFFIC) * rows * columns
    if traffic <= min(ghost, form) and budget.may_hold(size, saved):
        return "hold"
    return "ghost" if ghost <= form else "form"


class SharedLeft:
    """The Gram matrices of a left factor that several weight matrices share."""

    def __init__(self, left: Tensor, loan: Loan | None = None) -> None:
        self.left = left
        self.loan = loan  # the factor's memory, held as long as the factor is in use
        self.gram: Tensor | None = None

    def get(self) -> Tensor:
        """Return the Gram matrices ``[count, terms, terms]`` in the accumulation type."""
        if self.gram is None:
            left = self.left.to(accumulation_dtype(self.left.dtype))
            self.gram = gram(left)
        return self.gram


class Outer(Contribution):
    """Sums of outer products: ``left [count, terms, rows]``, ``right [count, terms, columns]``."""

    __slots__ = ("budget", "count", "dtype", "held", "left", "right", "shape", "shared")

    def __init__(
        self, left: Tensor, right: Tensor, budget: MemoryBudget, shared: SharedLeft | None = None
    ) -> None:
        self.shared = shared
        self.left: Tensor | None = left
        self.right: Tensor | None = right
        self.held: Tensor | None = None  # [count, rows * columns]
        self.budget = budget
        self.count = left.shape[0]
        self.shape = (left.shape[2], right.shape[2])
        self.dtype = accumulation_dtype(left.dtype)

    def factors(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the left and right factors for a range of records, in the accumulation type."""
        assert self.left is not None
        assert self.right is not None
        left, right = self.left[start:stop], self.right[start:stop]
        return left.to(self.dtype), right.to(self.dtype)

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`; may replace the factors with the gradients themselves."""
        assert self.left is not None
        assert self.right is not None
        terms, (rows, columns) = self.left.shape[1], self.shape
        if terms == 1:
            left, right = (row_norms(factor.flatten(1)) for factor in self.factors())
            return without_huge((left * right).square_(), left, right)
        saved = self.left.nbytes + self.right.nbytes
        way = choose(self.budget, self.count, terms, rows, columns, saved)
        if way == "ghost":
            return self._ghost(terms)
        return self._formed(rows, columns, hold=way == "hold")

    def _ghost(self, terms: int) -> Tensor:
        # the factors are already in memory; only the Gram matrices are new
        step = max(4, self.budget.chunk_bytes // (8 * terms * terms))
        if step >= self.count and self.shared is not None:
            _, right = self.factors()
            return squares_from_grams(self.shared.get(), gram(right), self._form_record)
        parts = []
        for start in range(0, self.count, step):
            left, right = self.factors(start, start + step)
            form = partial(self._form_record, start=start)
            parts.append(squares_from_grams(gram(left), gram(right), form))
        return torch.cat(parts)

    def _form_record(self, number: int, start: int = 0) -> Tensor:
        return self.per_record(start + number, start + number + 1)

    def _formed(self, rows: int, columns: int, hold: bool) -> Tensor:
        assert self.left is not None
        step = max(1, self.budget.chunk_bytes // (4 * rows * columns))
        held = None
        if hold:
            like = self.left[:0].to(self.dtype)
            held = self.budget.workspace.lend((self.count, rows, columns), like)
        norms = self.left.new_empty(self.count, dtype=self.dtype)
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            left, right = self.factors(start, stop)
            if held is None:
                formed = torch.bmm(left.mT, right)
            else:
                formed = torch.bmm(left.mT, right, out=held[start:stop])
            norms[start:stop] = row_norms(formed.flatten(1))
        if held is not None:
            self.held, self.left, self.right = held.flatten(1), None, None
        return norms.square_()

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        if self.held is not None:
            return self.held[start:stop].unflatten(1, self.shape).clone()
        left, right = self.factors(start, stop)
        return torch.bmm(left.mT, right)

    @property
    def formed(self) -> bool:
        """See :class:`Contribution`."""
        return self.left is None or self.left.shape[1] == 1

    def partial_sum(self, factors: Tensor, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        if self.held is not None:
            return (factors @ self.held[start:stop]).unflatten(0, self.shape)
        left, right = self.factors(start, stop)
        rows = few_rows(factors)
        if rows is not None:
            left, right, factors = left[rows], right[rows], factors[rows]
        scale = factors[:, None, None]
        if self.shape[0] <= self.shape[1]:
            left = left * scale
        else:
            right = right * scale
        if left.stride(0) < left.stride(1):  # time comes first in memory: avoid a copy
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return left.flatten(0, 1).mT @ right.flatten(0, 1)

    def __del__(self) -> None:
        if getattr(self, "held", None) is not None:
            self.budget.workspace.give_back(self.held)  # type: ignore[arg-type]

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        if self.held is not None:
            self.held[bad] = 0
        else:
            assert self.left is not None
            assert self.right is not None
            self.left, self.right = masked(self.left, bad), masked(self.right, bad)

    def most(self) -> Tensor | None:
        """See :class:`Contribution`; this is the Cauchy-Schwarz bound."""
        if self.left is None or self.right is None or self.left.shape[1] == 1:
            return None
        return lengths(self.left, self.count) * lengths(self.right, self.count)
