"""Numerical precision of norms and sums, which determine how far a record moves the model."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["HUGE", "accumulation_dtype", "full_precision", "lengths", "masked", "without_huge"]

HUGE = 1e12
"""A gradient with a factor longer than this counts as not finite.

A norm is a product of two lengths. If one factor is this long, the other may be so short that its
square underflows in float32 although the product does not, and the norm would come out too small.
Below this limit, any gradient that underflows has a norm of at most 1e-7.
"""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for norms and sums: float32 for half-precision models (pitfall 22)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def masked(tensor: Tensor, bad: Tensor) -> Tensor:
    """Return a copy with the records in `bad` set to exactly zero, even if they were inf or nan."""
    return tensor.masked_fill(bad.reshape(-1, *[1] * (tensor.dim() - 1)), 0)


def lengths(tensor: Tensor, count: int) -> Tensor:
    """Return the L2 norm of each record's part of a tensor, `[count]`."""
    flat = tensor.reshape(count, -1)
    return torch.linalg.vector_norm(flat, dim=1, dtype=accumulation_dtype(tensor.dtype))


def full_precision(device: torch.device) -> AbstractContextManager:
    """Switch autocast off, so that norms and sums keep the type of their tensors."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_huge(norms: Tensor, *lengths: Tensor) -> Tensor:
    """Set the norm of every record with a huge factor to infinity.

    Args:
        norms: `[count]`, or their squares; overwritten and returned.
        lengths: the lengths of the factors, each `[..., count]`.
    """
    for factor in lengths:
        if factor.numel() and not float(factor.max()) <= HUGE:  # usually a single call
            huge = (factor > HUGE).reshape(-1, factor.shape[-1]).any(dim=0)
            norms.masked_fill_(huge, math.inf)
    return norms
