"""Gradients that are sums of outer products: `g_i = sum_t left[i, t] (x) right[i, t]`.

Every use of a matrix has this form: linear layers (left = gradient of the output, right = input),
recurrent weights, attention projections. With T terms, O rows and I columns, a record's norm
costs `T^2 (O + I)` through Gram matrices ("ghost norm": |g_i|^2 = sum_st <left_s, left_t>
<right_s, right_t>) and `T O I` by forming the gradient. If these gradients can be kept in
memory, the weighted sum is a matrix-vector product; otherwise it costs another `T O I` per
record.

References: Goodfellow 2015 (T = 1); Li et al. 2022, "Large language models can be strong
differentially private learners" (ghost norm); Bu et al. 2023, "Differentially private optimization
on large model at small cost" (book-keeping, choice per layer).
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from functools import cached_property

import torch
from torch import Tensor

from ownerwise.gradients.contributions.blocks import sum_of_outer_products, weighted_sum_of_rows
from ownerwise.gradients.contributions.contribution import Contribution, few_rows
from ownerwise.gradients.contributions.grams import gram, squares_and_bounds
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import (
    accumulation_dtype,
    lengths,
    masked,
    row_norms,
    without_huge,
)
from ownerwise.gradients.products import product, products
from ownerwise.gradients.segments import Segments
from ownerwise.gradients.workspace import Loan

__all__ = ["Outer", "OuterProducts", "SharedLeft"]

# The cost of one float of a held gradient (one write, one read for the norm, one read for the sum),
# in multiply-adds of a large matrix product: estimates for two cores, AVX-512 and 48 MB of cache.
# 64 terms of 384 x 384 numbers take about as long either way; Gram matrices need less memory.
TRAFFIC_IN_CACHE, TRAFFIC, CACHE_BYTES = 28, 110, 32 << 20
# A rough factor by which multiply-adds are slower in Gram matrices, because these are small.
GRAM = 1.2


class SharedLeft:
    """A left factor that several weight matrices share, and its Gram matrices."""

    def __init__(self, left: Tensor, loan: Loan | None = None) -> None:
        self.left = left
        self.loan = loan  # the factor's memory, held as long as the factor is in use

    @cached_property
    def gram(self) -> Tensor:
        """The Gram matrices `[count, terms, terms]` in the accumulation type."""
        return gram(self.left.to(accumulation_dtype(self.left.dtype)))


class OuterProducts(Contribution):
    """Sums of outer products, stored as two factors or as the gradients formed from them.

    Attributes:
        left, right: all records' factors; deleted when the formed gradients are held instead.
        held: the formed gradients, `[count, rows * columns]`, or None.
        terms, rows, columns: the size of a record's sum; `columns` counts the columns of one group.
        groups: the number of separate sums, each with its own share of the rows.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        sizes: tuple[int, int, int],
        budget: MemoryBudget,
        *,
        groups: int = 1,
        shared: SharedLeft | None = None,
    ) -> None:
        self.left, self.right = left, right
        self.held: Tensor | None = None
        self.terms, self.rows, self.columns = sizes
        self.budget, self.groups, self.shared = budget, groups, shared
        self.dtype = accumulation_dtype(left.dtype)
        self._bound: Tensor | None = None  # on the terms, if Gram matrices have shown it

    @abstractmethod
    def left_right(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the factors of a range of records in the accumulation type.

        Their shapes are `[records * groups, terms, rows / groups]` and `[..., columns]`.
        """

    @abstractmethod
    def shaped(self, formed: Tensor) -> Tensor:
        """Turn formed gradients `[..., rows * columns]` into `[..., *shape]`."""

    @abstractmethod
    def records_at_once(self, way: str) -> int:
        """Return the number of records whose norms are computed in one chunk, within the cache."""

    @abstractmethod
    def sum_of_products(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Compute `partial_sum` when the gradients are not held."""

    @property
    def one_term(self) -> bool:
        """See `Contribution`."""
        return self.held is not None or self.terms == 1

    def squared_norms(self) -> Tensor:
        """See `Contribution`; may replace the factors with the gradients themselves."""
        way = self._cheapest()
        held = None
        if way == "hold":
            like = self.left[:0].to(self.dtype)
            held = self.budget.workspace.lend((self.count, self.rows * self.columns), like)
        step, threads = self.records_at_once(way), torch.get_num_threads()
        if step > threads:
            step -= step % threads  # otherwise some threads would wait for the last records
        parts, bounds = [], []
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            if way == "ghost":
                squares, bound = self._ghost(start, stop)
                parts.append(squares)
                bounds.append(bound)
            else:
                into = None if held is None else held[start:stop]
                parts.append(row_norms(self._form(start, stop, into)).square_())
        if held is not None:
            self.held, self.shared = held, None
            del self.left, self.right
        if bounds:
            self._bound = torch.cat(bounds)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cheapest(self) -> str:
        """Return "ghost", "form" or "hold": the cheapest method that fits in memory."""
        columns = self.columns * self.groups
        form = self.terms * self.rows * columns
        ghost = GRAM * self.terms * self.terms * (self.rows + columns)
        size = 4 * self.count * self.rows * columns
        traffic = (TRAFFIC_IN_CACHE if size <= CACHE_BYTES else TRAFFIC) * self.rows * columns
        replaced = self.left.nbytes + self.right.nbytes
        if traffic <= min(ghost, form) and self.budget.may_hold(size, replaced):
            return "hold"
        # each group would need its own pair of Gram matrices
        return "ghost" if ghost <= form and self.groups == 1 else "form"

    def _ghost(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        left, right = self.left_right(start, stop)
        shared = self.shared if stop - start == self.count else None
        left_gram = gram(left) if shared is None else shared.gram

        def form(number: int) -> Tensor:
            return self.per_record(start + number, start + number + 1)

        entries = left.shape[2] + right.shape[2]
        return squares_and_bounds(left_gram, gram(right), entries, form)

    def _form(self, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        """Return the gradients of a range of records, `[records, rows * columns]`."""
        left, right = self.left_right(start, stop)
        if into is None:
            return products(left.mT, right).view(stop - start, -1)
        products(left.mT, right, out=into.view(len(left), -1, self.columns))
        return into

    def sums_of(self, segments: Segments) -> Tensor:
        """Return the gradients of consecutive records added up, `[segments, *shape]`.

        The terms of all records of a segment are added in a single product.
        """
        assert self.held is None
        assert self.groups == 1
        total = self.left.new_empty((len(segments), self.rows, self.columns), dtype=self.dtype)
        ends = segments.ends
        size = 4 * self.terms * (self.rows + self.columns)
        at_once = max(1, self.budget.chunk_bytes // size)  # records whose factors fit in the cache
        first = 0
        while first < len(segments):
            last = max(first + 1, bisect_right(ends, ends[first] + at_once) - 1)
            left, right = self.left_right(ends[first], ends[last])
            left, right = left.flatten(0, 1), right.flatten(0, 1)
            if segments.equal:
                left, right = (part.unflatten(0, (last - first, -1)) for part in (left, right))
                products(left.mT, right, out=total[first:last])
            else:
                counts = (segments.sizes[first:last] * self.terms).tolist()
                parts = zip(left.split(counts), right.split(counts), strict=True)
                for number, (d, a) in enumerate(parts, first):
                    total[number] = product(d.mT, a)
            first = last
        return self.shaped(total.flatten(1))

    def per_record(self, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        if self.held is None:
            return self.shaped(self._form(start, stop))
        return self.shaped(self.held[start:stop].clone())

    def weighted_sum(self, weights: Tensor, *, in_blocks: bool = True) -> Tensor:
        """See `Contribution`."""
        if self.held is None or not in_blocks:
            return super().weighted_sum(weights, in_blocks=in_blocks)
        return self.shaped(weighted_sum_of_rows(weights, self.held))

    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        if self.held is None:
            return self.sum_of_products(weights, start, stop)
        return self.shaped(weights @ self.held[start:stop])

    def drop(self, bad: Tensor) -> None:
        """See `Contribution`."""
        if self.held is not None:
            self.held[bad] = 0
            return
        bad = bad.repeat_interleave(len(self.left) // self.count)
        self.left, self.right = masked(self.left, bad), masked(self.right, bad)

    def terms_bound(self) -> Tensor | None:
        """See `Contribution`; without Gram matrices, this is the Cauchy-Schwarz bound."""
        if self.one_term:
            return None
        if self._bound is not None:
            return self._bound
        return lengths(self.left, self.count) * lengths(self.right, self.count)

    def __del__(self) -> None:
        if getattr(self, "held", None) is not None:
            self.budget.workspace.give_back(self.held)  # type: ignore[arg-type]


class Outer(OuterProducts):
    """The use of a matrix: `left [count, terms, rows]`, `right [count, terms, columns]`.

    With one term (a layer applied to one vector per record), |g_i| = |left_i| |right_i|.
    """

    def __init__(
        self, left: Tensor, right: Tensor, budget: MemoryBudget, shared: SharedLeft | None = None
    ) -> None:
        self.count, terms, rows = left.shape
        self.shape = (rows, right.shape[2])
        super().__init__(left, right, (terms, *self.shape), budget, shared=shared)

    def left_right(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `OuterProducts`."""
        return self.left[start:stop].to(self.dtype), self.right[start:stop].to(self.dtype)

    def shaped(self, formed: Tensor) -> Tensor:
        """See `OuterProducts`."""
        return formed.unflatten(-1, self.shape)

    def records_at_once(self, way: str) -> int:
        """See `OuterProducts`; the factors are already in memory, so only the results count."""
        if way == "ghost":
            return max(4, self.budget.chunk_bytes // (8 * self.terms * self.terms))
        return max(1, self.budget.chunk_bytes // (4 * self.rows * self.columns))

    def squared_norms(self) -> Tensor:
        """See `Contribution`."""
        if self.terms > 1:
            return super().squared_norms()
        left, right = (row_norms(factor[:, 0]) for factor in self.left_right(0, self.count))
        return without_huge((left * right).square_(), left, right)

    def weighted_sum(self, weights: Tensor, *, in_blocks: bool = True) -> Tensor:
        """See `Contribution`."""
        if self.terms > 1 or not in_blocks:
            return super().weighted_sum(weights, in_blocks=in_blocks)
        left, right = self._scaled(*self.left_right(0, self.count), weights)
        return sum_of_outer_products(left[:, 0], right[:, 0])

    def sum_of_products(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `OuterProducts`."""
        left, right = self.left_right(start, stop)
        rows = None if self.budget.even else few_rows(weights)
        if rows is not None:
            left, right, weights = left[rows], right[rows], weights[rows]
        left, right = self._scaled(left, right, weights)
        if left.stride(0) < left.stride(1):  # time comes first in memory: avoid a copy
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return product(left.flatten(0, 1).mT, right.flatten(0, 1))

    def sketch(self, left: Tensor, right: Tensor) -> Tensor:
        """See `Contribution`."""
        if self.held is not None:
            return super().sketch(left, right)
        d, a = self.left_right(0, self.count)
        return ((d @ left.T.to(d)) * (a @ right.T.to(a))).sum(dim=1)

    def _scaled(self, left: Tensor, right: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        scale = weights[:, None, None]
        return (left * scale, right) if self.rows <= self.columns else (left, right * scale)
