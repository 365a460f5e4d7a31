"""Gradient norms of parameters with several uses, from Gram matrices that include cross terms.

If use k of a matrix adds `sum_t left_kt (x) right_kt`, all uses together form one longer sum over
(k, t), whose squared norm is `sum <left_s, left_t> <right_s, right_t>` over all pairs. A look-up
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
from ownerwise.gradients.contributions.grams import gram, inner_products, squares_and_bounds
from ownerwise.gradients.contributions.lookup import Lookup
from ownerwise.gradients.contributions.outer import GRAM, TRAFFIC, Outer
from ownerwise.gradients.memory_budget import MemoryBudget

__all__ = ["shared_ghost_norms"]


def shared_ghost_norms(
    uses: Sequence[Contribution], budget: MemoryBudget
) -> tuple[Tensor, Tensor] | None:
    """Return squared norms and upper bounds on the sums of the norms of the terms, `[count]` each.

    Return None if forming the summed gradients is cheaper.
    """
    matrices = [use for use in uses if isinstance(use, Outer | Lookup)]
    if len(matrices) < len(uses) or any(getattr(use, "held", None) is not None for use in uses):
        return None
    terms = sum(use.terms for use in matrices)
    height, width = matrices[0].shape
    dense = sum(use.terms for use in matrices if isinstance(use, Outer))
    ghost = GRAM * (dense**2 * height + terms**2 * width)
    if ghost > (dense + TRAFFIC) * height * width:
        return None
    count = matrices[0].count
    step = max(1, budget.chunk_bytes // (2 * terms * terms + terms * (height + width)))
    squares, bounds = [], []
    for start in range(0, count, step):
        pairs = [use.left_right(start, min(start + step, count)) for use in matrices]
        right = gram(torch.cat([right for _, right in pairs], dim=1))
        rows = [torch.cat([_products(a, b, right.dtype) for b, _ in pairs], 2) for a, _ in pairs]
        form = partial(_formed, uses, start)
        square, bound = squares_and_bounds(torch.cat(rows, dim=1), right, height + width, form)
        squares.append(square)
        bounds.append(bound)
    return torch.cat(squares), torch.cat(bounds)


def _formed(uses: Sequence[Contribution], start: int, number: int) -> Tensor:
    """Return the gradient of one record, summed over all uses."""
    first, *others = (use.per_record(start + number, start + number + 1) for use in uses)
    return sum(others, start=first)


def _products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return <a_s, b_t>, `[records, s, t]`, for vectors `[records, terms, rows]`.

    Unit vectors are given by their ids, `[records, terms]`.
    """
    if a.dim() == b.dim() == 2:
        return (a[:, :, None] == b[:, None, :]).to(dtype)
    if a.dim() == 2:
        return _products(b, a, dtype).mT
    if b.dim() == 2:
        return a.gather(2, b[:, None, :].expand(-1, a.shape[1], -1))
    return inner_products(a, b)
