"""Gradients that are sums of outer products: ``g_i = sum_t left[i, t] (x) right[i, t]``.

That is every use of a matrix: linear layers (left = gradient of the output, right = input),
recurrent weights, projections of attention. With T terms, O rows and I columns a record's norm
costs ``T^2 (O + I)`` by the Gram matrices ("ghost norm": |g_i|^2 = sum_st <left_s, left_t>
<right_s, right_t>) and ``T O I`` by forming the gradient. Formed gradients, where they may be held,
make the weighted sum a matrix-vector product; else it is one more ``T O I`` over the batch.

References: Goodfellow 2015 (T = 1); Li et al. 2022, "Large language models can be strong
differentially private learners" (ghost norm); Bu et al. 2023, "Differentially private optimization
on large model at small cost" (book-keeping, choice per layer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ownerwise.gradients.contributions import (
    Contribution,
    Policy,
    accumulation_dtype,
    masked,
)

__all__ = ["Outer", "Plan", "choose"]

# One float written, read for the norm and read for the sum costs about as much as this many
# multiply-adds of a matrix product (two cores, AVX-512: 100 GFLOP/s against 10 GB/s).
TRAFFIC = 24

Plan = str  # "ghost", "form" (and throw away) or "hold"


def choose(policy: Policy, count: int, terms: int, rows: int, columns: int, saved: int) -> Plan:
    """The cheapest way to norms and sum that the memory allows; ``saved`` bytes are held anyway."""
    form = terms * rows * columns
    ghost = terms * terms * (rows + columns)
    size = rows * columns
    if form + TRAFFIC * size <= min(ghost, form) + form and policy.may_hold(
        4 * count * size, saved
    ):
        return "hold"
    return "ghost" if ghost <= form else "form"


class Outer(Contribution):
    """``left``: ``[count, terms, rows]``, ``right``: ``[count, terms, columns]``."""

    __slots__ = ("count", "dtype", "held", "left", "policy", "right", "shape")

    def __init__(self, left: Tensor, right: Tensor, policy: Policy) -> None:
        self.left: Tensor | None = left
        self.right: Tensor | None = right
        self.held: Tensor | None = None  # [count, rows * columns]
        self.policy = policy
        self.count = left.shape[0]
        self.shape = (left.shape[2], right.shape[2])
        self.dtype = accumulation_dtype(left.dtype)

    def factors(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Left and right factors of a range of records, in the dtype of accumulation."""
        assert self.left is not None
        assert self.right is not None
        left, right = self.left[start:stop], self.right[start:stop]
        return left.to(self.dtype), right.to(self.dtype)

    def squared_norms(self) -> Tensor:
        """See :class:`Contribution`; may trade the factors for the formed gradients."""
        assert self.left is not None
        assert self.right is not None
        terms, (rows, columns) = self.left.shape[1], self.shape
        if terms == 1:
            left, right = self.factors()
            norm = torch.linalg.vector_norm
            return (norm(left, dim=2) * norm(right, dim=2)).square_().squeeze(1)
        saved = self.left.nbytes + self.right.nbytes
        plan = choose(self.policy, self.count, terms, rows, columns, saved)
        if plan == "ghost":
            return self._ghost(terms)
        return self._formed(rows, columns, hold=plan == "hold")

    def _ghost(self, terms: int) -> Tensor:
        total = self.policy.chunk_bytes * 4
        step = max(1, total // (4 * (2 * terms * terms + terms * sum(self.shape))))
        parts = []
        for start in range(0, self.count, step):
            left, right = self.factors(start, start + step)
            gram = torch.bmm(left, left.mT).mul_(torch.bmm(right, right.mT))
            parts.append(gram.sum(dim=(1, 2)))
        return torch.cat(parts).clamp_(min=0)

    def _formed(self, rows: int, columns: int, hold: bool) -> Tensor:
        assert self.left is not None
        step = max(1, self.policy.chunk_bytes // (4 * rows * columns))
        held = None
        if hold:
            held = self.left.new_empty(self.count, rows, columns, dtype=self.dtype)
        norms = self.left.new_empty(self.count, dtype=self.dtype)
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            left, right = self.factors(start, stop)
            if held is None:
                formed = torch.bmm(left.mT, right)
            else:
                formed = torch.bmm(left.mT, right, out=held[start:stop])
            torch.linalg.vector_norm(formed.flatten(1), dim=1, out=norms[start:stop])
        if held is not None:
            self.held, self.left, self.right = held.flatten(1), None, None
        return norms.square_()

    def per_record(self, start: int, stop: int) -> Tensor:
        """See :class:`Contribution`."""
        if self.held is not None:
            return self.held[start:stop].unflatten(1, self.shape)
        left, right = self.factors(start, stop)
        return torch.bmm(left.mT, right)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """See :class:`Contribution`."""
        if self.held is not None:
            return (factors @ self.held).unflatten(0, self.shape)
        left, right = self.factors()
        left = (left * factors[:, None, None]).flatten(0, 1)
        return left.mT @ right.flatten(0, 1)

    def drop(self, bad: Tensor) -> None:
        """See :class:`Contribution`."""
        if self.held is not None:
            self.held = masked(self.held, bad)
        else:
            assert self.left is not None
            assert self.right is not None
            self.left, self.right = masked(self.left, bad), masked(self.right, bad)
