"""Contributions of whole owners: the rows of a contribution, added up within segments.

If the owners' gradients fit in memory, they are formed once and serve for norms and sums. Otherwise
sums give each row its owner's factor, and norms come from outer products and look-ups that are
padded to equal numbers of terms, so that an owner is a record with more terms; the gradients of
other contributions are formed in parts and added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ownerwise.gradients.contributions.contribution import Contribution, Dense
from ownerwise.gradients.contributions.grams import HIDDEN_ROUNDINGS
from ownerwise.gradients.contributions.lookup import Lookup
from ownerwise.gradients.contributions.outer import Outer, OuterProducts
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.precision import row_norms
from ownerwise.gradients.segments import Bucket, Segments

__all__ = ["Grouped"]

# Segments are summed apart if their rows are CANCELLING / _CARE times as long as their sum.
_CARE = 33.0
# Below this many multiply-adds per segment, one product of padded segments is faster than one
# product for each of them.
_SMALL = 1 << 17


class Grouped(Contribution):
    """One use of a parameter, for the segments of the rows that `inner` covers."""

    def __init__(self, inner: Contribution, segments: Segments, budget: MemoryBudget) -> None:
        self.inner, self.segments, self.budget = inner, segments, budget
        self.count, self.shape = len(segments), inner.shape
        self._bound: Tensor | None = None
        self._owners: Contribution | None = None  # the formed gradients, one per segment

    @property
    def one_term(self) -> bool:
        """See `Contribution`."""
        return self._owners is not None or (self.inner.one_term and self.segments.largest == 1)

    def squared_norms(self) -> Tensor:
        """See `Contribution`; may replace the rows with the segments' gradients."""
        if self._may_hold():
            self._owners = self._formed()
            return self._owners.squared_norms()
        if not isinstance(self.inner, Outer | Lookup):
            return self._norms_of_formed().square_()
        self._bound = self._of_rows(self.inner.terms_bound())
        squares = torch.empty_like(self._bound)
        for bucket in self.segments.buckets:
            squares[bucket.members] = _padded(self.inner, bucket, self.budget).squared_norms()
        return squares

    def _may_hold(self) -> bool:
        """Return whether the gradients of all segments are small enough to be formed at once."""
        numbers = torch.Size(self.shape).numel()
        if isinstance(self.inner, Lookup) and numbers > self.inner.gradient[0].numel():
            return False  # mostly zeros
        return self.budget.may_hold(4 * self.count * numbers, 0)

    def _formed(self) -> Contribution:
        """Return the segments' gradients, each formed in a single product if possible."""
        inner, segments = self.inner, self.segments
        if not isinstance(inner, OuterProducts) or inner.groups > 1:
            return Dense(self.per_record(0, self.count))
        products = segments.rows * inner.terms * inner.rows * inner.columns
        small = products < _SMALL * self.count and not segments.equal
        if small and isinstance(inner, Outer) and len(segments.buckets) == 1:
            owners = _padded(inner, segments.buckets[0], self.budget)
            return Dense(owners.per_record(0, self.count))
        return Dense(inner.sums_of(segments))

    def _of_rows(self, bound: Tensor | None, lengths: Tensor | None = None) -> Tensor:
        """Return the sum over a segment's rows of the lengths of their terms."""
        if bound is not None:
            return self.segments.sum(bound)
        # Rows whose own lengths are known are treated with more care: it takes no crafted terms to
        # make the rows of a segment cancel each other.
        lengths = self.inner.squared_norms().sqrt_() if lengths is None else lengths
        return self.segments.sum(lengths) * _CARE

    def _norms_of_formed(self) -> Tensor:
        """Return the norms, rounded up by more than adding up the rows can be off."""
        # this may hold the rows' gradients, which then need not be formed again
        lengths = self.inner.squared_norms().sqrt_()
        self._bound = self._of_rows(self.inner.terms_bound(), lengths)
        parts = [
            row_norms(self.per_record(start, stop).reshape(stop - start, -1))
            for start, stop in self._chunks(self.count)
        ]
        roundings = max(HIDDEN_ROUNDINGS, self.segments.largest) * torch.finfo(lengths.dtype).eps
        return torch.cat(parts).to(lengths) + roundings * self.segments.sum(lengths)

    def per_record(self, start: int, stop: int) -> Tensor:
        """See `Contribution`; here, the gradients of a range of segments."""
        if self._owners is not None:
            return self._owners.per_record(start, stop)
        first, last = self.segments.ends[start], self.segments.ends[stop]
        index = self.segments.index[first:last] - start
        total: Tensor | None = None
        for at, to in self._chunks(last - first):
            rows = self.inner.per_record(first + at, first + to).reshape(to - at, -1)
            if total is None:
                total = rows.new_zeros((stop - start, rows.shape[1]))
            total.index_add_(0, index[at:to].to(rows.device), rows)  # much faster on flat rows
        if total is None:
            return self.inner.per_record(0, 0)
        return total.view(stop - start, *self.shape)

    def weighted_sum(self, weights: Tensor, *, in_blocks: bool = True) -> Tensor:
        """See `Contribution`."""
        if self._owners is not None:
            return self._owners.weighted_sum(weights, in_blocks=in_blocks)
        return self.inner.weighted_sum(self.segments.expand(weights), in_blocks=in_blocks)

    def partial_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `Contribution`."""
        if self._owners is not None:
            return self._owners.partial_sum(weights, start, stop)
        first, last = self.segments.ends[start], self.segments.ends[stop]
        index = self.segments.index[first:last].to(weights.device) - start
        return self.inner.partial_sum(weights[index], first, last)

    def drop(self, bad: Tensor) -> None:
        """See `Contribution`."""
        if self._owners is not None:
            self._owners.drop(bad)
        else:
            self.inner.drop(self.segments.expand(bad))

    def terms_bound(self) -> Tensor | None:
        """See `Contribution`; the rows of a segment may cancel each other."""
        return self._bound

    def row_lengths(self) -> Tensor:
        """Return the norm of each row's gradient, `[rows]`."""
        held = getattr(self.inner, "held", None)
        return self.inner.squared_norms().sqrt() if held is None else row_norms(held)

    def padded(self) -> Contribution | None:
        """Return the segments as records with more terms, or None if there is no short way."""
        if not isinstance(self.inner, Outer | Lookup) or len(self.segments.buckets) > 1:
            return None
        return _padded(self.inner, self.segments.buckets[0], self.budget)

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        """Divide `count` gradients into ranges that fit in the cache."""
        size = 4 * max(1, torch.Size(self.shape).numel())
        step = max(1, 8 * self.budget.chunk_bytes // size)
        return [(start, min(start + step, count)) for start in range(0, count, step)]


def _padded(inner: Outer | Lookup, bucket: Bucket, budget: MemoryBudget) -> Outer | Lookup:
    """Return the segments of a bucket as records with the terms of all their rows."""
    if isinstance(inner, Lookup):
        ids, gradient = bucket.repeated(inner.ids), bucket.padded(inner.gradient)
        return Lookup(ids.flatten(1, 2), gradient.flatten(1, 2), inner.shape[0])
    left, right = bucket.padded(inner.left), bucket.repeated(inner.right)
    return Outer(left.flatten(1, 2), right.flatten(1, 2), budget)
