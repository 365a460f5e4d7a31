"""Gradient norms of parameters with several uses, from Gram matrices that include cross terms.

If use k of a matrix adds ``sum_t left_kt (x) right_kt``, all uses together form one longer sum over
(k, t), whose squared norm is ``sum <left_s, left_t> <right_s, right_t>`` over all pairs. A look-up
(embedding) is such a sum whose left vectors are unit vectors: the inner product of two unit vectors
is 1 if their ids are equal and 0 otherwise, and the inner product of a unit vector and a dense
vector is an entry of the latter. This covers an embedding tied to the output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ownerwise.gradients.contributions.contribution import Contribution
from ownerwise.gradients.contributions.grams import gram, squares_from_grams
from ownerwise.gradients.contributions.lookup import Lookup
from ownerwise.gradients.contributions.outer import Outer
from ownerwise.gradients.contributions.vectors import RankOne
from ownerwise.gradients.memory_budget import MemoryBudget

__all__ = ["shared_ghost_norms"]


def shared_ghost_norms(uses: Sequence[Contribution], budget: MemoryBudget) -> Tensor | None:
    """Return the squared norms, ``[count]``, or None if forming the summed gradients is cheaper."""
    terms = 0
    for use in uses:
        if isinstance(use, Outer) and use.left is not None:
            terms += use.left.shape[1]
        elif isinstance(use, RankOne):
            terms += 1
        elif isinstance(use, Lookup):
            terms += use.ids.shape[1]
        else:
            return None
    rows, columns = uses[0].shape[0], uses[0].shape[-1]
    if terms * (rows + columns) > rows * columns:
        return None
    count = uses[0].count
    step = max(1, 4 * budget.chunk_bytes // (4 * (2 * terms * terms + terms * (rows + columns))))
    parts = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        right = torch.cat([_right(use, start, stop) for use in uses], dim=1)
        blocks = [torch.cat([_left_products(a, b, start, stop) for b in uses], dim=2) for a in uses]
        form = partial(_formed, uses, start)
        parts.append(squares_from_grams(torch.cat(blocks, dim=1), gram(right), form))
    return torch.cat(parts)


def _formed(uses: Sequence[Contribution], start: int, number: int) -> Tensor:
    """Return the gradient of one record, summed over all uses."""
    first, *others = (use.per_record(start + number, start + number + 1) for use in uses)
    return sum(others, start=first)


def _factors(use: Contribution, start: int, stop: int) -> tuple[Tensor, Tensor]:
    if isinstance(use, RankOne):
        return use.left[start:stop, None], use.right[start:stop, None]
    assert isinstance(use, Outer)
    return use.factors(start, stop)


def _right(use: Contribution, start: int, stop: int) -> Tensor:
    if isinstance(use, Lookup):
        return use.gradients(start, stop)
    return _factors(use, start, stop)[1]


def _left_products(a: Contribution, b: Contribution, start: int, stop: int) -> Tensor:
    """Return <left_s of a, left_t of b>, ``[records, terms of a, terms of b]``."""
    if isinstance(a, Lookup):
        if not isinstance(b, Lookup):
            return _left_products(b, a, start, stop).mT
        same = a.ids[start:stop, :, None] == b.ids[start:stop, None, :]
        return same.to(a.dtype)
    left = _factors(a, start, stop)[0]  # [records, s, rows]
    if not isinstance(b, Lookup):
        return torch.bmm(left, _factors(b, start, stop)[0].mT)
    ids = b.ids[start:stop, None, :].expand(-1, left.shape[1], -1)
    return left.gather(2, ids)
