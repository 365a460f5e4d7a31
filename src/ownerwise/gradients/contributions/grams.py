"""Norms from Gram matrices, protected against rounding errors.

If a record's gradient is `sum_t left_t (x) right_t`, its squared norm is the sum of all products
`<left_s, left_t> <right_s, right_t>`. If the terms nearly cancel, as with gradients that add up
to zero over equal tokens, that sum is much smaller than its terms. Rounding may then make it zero
or negative, and the record would not be clipped at all. Such records are detected by comparing the
sum with the square of the upper bound `sum_t |left_t| |right_t|` on the norm; their gradients are
formed explicitly. All norms are rounded up by more than rounding errors can take away.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ownerwise.gradients.precision import row_norms, without_huge
from ownerwise.gradients.products import products

__all__ = ["gram", "inner_products", "squares_and_bounds", "squares_from_grams"]

# A squared norm smaller than this many rounding errors of its upper bound is not trusted: rounding
# it up would make the norm too large by more than 1.3%.
TRUSTED_ROUNDINGS = 1e4
# By how much a squared norm is rounded up, in rounding errors of the square of its upper bound: at
# least, for each entry of a term's factors, and at most. With two kinds of terms that nearly
# cancel, of equal entries each, squares were too small by up to 3 of them for 32 entries, 40 for
# 512, and 92 for up to 30,000 (2 to 200 terms, by either library of `products`).
GRAM_ROUNDINGS, ENTRY_ROUNDINGS, MOST_ROUNDINGS = 32, 0.25, 256
# Products that one call adds up; a longer sum of like ones rounds in one direction.
_AT_ONCE = 4096
# The error allowed for forming and summing a gradient, in units of the rounding error of the upper
# bound on its norm.
HIDDEN_ROUNDINGS = 4


def gram(vectors: Tensor) -> Tensor:
    """Return all inner products within each record, `[count, terms, terms]`."""
    return inner_products(vectors, vectors)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return <left_s, right_t>, `[count, s, t]`, for vectors `[count, terms, entries]`."""
    first, *others = zip(left.split(_AT_ONCE, 2), right.split(_AT_ONCE, 2), strict=True)
    total = products(first[0], first[1].mT)
    for a, b in others:
        total.baddbmm_(a, b.mT)
    return total


def squares_from_grams(
    left: Tensor, right: Tensor, entries: int, form: Callable[[int], Tensor]
) -> Tensor:
    """Return squared norms, `[count]`; see `squares_and_bounds`."""
    return squares_and_bounds(left, right, entries, form)[0]


def squares_and_bounds(
    left: Tensor, right: Tensor, entries: int, form: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return squared norms and the sums of the norms of each record's terms, `[count]` each.

    Args:
        left: inner products of the left factors, `[count, terms, terms]`.
        right: inner products of the right factors, of the same shape; overwritten.
        entries: the number of entries of a left and a right factor together.
        form: returns the gradient of the record at the given index.
    """
    lengths = [p.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt_() for p in (left, right)]
    most = (lengths[0] * lengths[1]).sum(dim=1)
    squares = right.mul_(left).sum(dim=(1, 2))
    rounding = torch.finfo(squares.dtype).eps
    lost = squares < TRUSTED_ROUNDINGS * rounding * most.square()
    added = min(GRAM_ROUNDINGS + ENTRY_ROUNDINGS * entries, MOST_ROUNDINGS)
    squares.addcmul_(most, most, value=added * rounding)
    roundings = max(HIDDEN_ROUNDINGS, left.shape[1]) * rounding  # one for each term that is added
    if lost.any():
        for number in lost.nonzero().flatten().tolist():
            norm = row_norms(form(number).reshape(1, -1))[0]
            squares[number] = (norm + roundings * most[number]).square()
    return without_huge(squares, *(length.mT for length in lengths)), most
