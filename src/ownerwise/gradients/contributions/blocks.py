"""Sum over many records in blocks, so that rounding errors do not grow with the batch size.

For any order of summation, the error of a float32 sum over k vectors is at most k unit roundoffs
times the sum of their norms. Here k is at most `BLOCK`, because the sums over blocks are added in
float64; small layers are summed in float64 throughout. The step's slack relies on this
(docs/proofs/arithmetic.md).

A convolution or a layer on sequences adds many terms per record in one kernel call, and calls on
few records are slow. For such layers, each block therefore has `LONG_BLOCK` records. The rounding
error of such a kernel is assumed to be no larger than that of `BLOCK` plain additions; this is
tested (tests/attacks/test_sums.py), but not proved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "LONG_BLOCK",
    "blocked_sum",
    "sum_of_outer_products",
    "sums_in_float64",
    "weighted_sum_of_rows",
]

BLOCK = 64
"""The largest number of vectors that may be summed in float32."""
LONG_BLOCK = 256
"""The largest number of records that may be summed in float32 if each adds several terms."""
# Above this many bytes, sums of blocks are added one by one instead of all at once.
_AT_ONCE = 8 << 20
# Up to this many products, one product in float64 is faster than blocks in float32.
_SMALL = 1 << 20
_SMALL_ROWS = 1 << 15  # the same for a weighted sum of rows


def blocked_sum(
    count: int, partial_sum: Callable[[int, int], Tensor], block: int = BLOCK
) -> Tensor:
    """Return the sum over all records, in float64 if there is more than one block.

    Args:
        count: number of records.
        partial_sum: returns the sum over the records from `start` to `stop`.
        block: number of records in a block.
    """
    if count <= block:
        return partial_sum(0, count)
    total = partial_sum(0, block).double()
    for start in range(block, count, block):
        total += partial_sum(start, min(start + block, count))
    return total


def sums_in_float64(left: Tensor, right: Tensor) -> bool:
    """Return whether the sum of outer products is computed as a single product in float64."""
    return len(left) > BLOCK and left.numel() * right.shape[1] <= _SMALL


def sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    """Return sum_i left[i] (x) right[i] for `left [count, rows]`, `right [count, columns]`."""
    count, rows, columns = *left.shape, right.shape[1]
    blocks = -(-count // BLOCK)
    if sums_in_float64(left, right):
        return left.double().mT @ right.double()
    if blocks <= 1 or blocks * rows * columns * left.element_size() > _AT_ONCE:
        return blocked_sum(count, lambda start, stop: left[start:stop].mT @ right[start:stop])
    whole = count - count % BLOCK
    sums = torch.bmm(left[:whole].view(-1, BLOCK, rows).mT, right[:whole].view(-1, BLOCK, columns))
    total = sums.sum(dim=0, dtype=torch.float64)
    return total if whole == count else total.add_(left[whole:].mT @ right[whole:])


def weighted_sum_of_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return sum_i weights[i] * rows[i] for `weights [count]`, `rows [count, numbers]`."""
    count, numbers = rows.shape
    if count <= BLOCK:
        return weights @ rows
    if rows.numel() <= _SMALL_ROWS:
        return weights.double() @ rows.double()
    whole = count - count % BLOCK
    blocks = rows[:whole].reshape(-1, BLOCK, numbers)
    sums = torch.bmm(weights[:whole].reshape(-1, 1, BLOCK), blocks)[:, 0]
    total = sums.sum(dim=0, dtype=torch.float64)
    return total if whole == count else total.add_(weights[whole:] @ rows[whole:])
