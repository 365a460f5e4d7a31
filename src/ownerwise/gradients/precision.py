"""What float32 must not take from norms and sums: they decide how far a record moves the model."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["HUGE", "full_precision", "without_huge"]

HUGE = 1e12
"""Factors of a gradient that are longer than this count as not finite.

A norm is a product of two lengths. Beside such a factor the other one may be so short that its
square vanishes in float32 while the product does not: the norm would be too small. Below, what
vanishes has a norm of 1e-7 at most.
"""


def full_precision(device: torch.device) -> AbstractContextManager:
    """Norms and sums inside are of the type that their tensors have, under autocast too."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_huge(norms: Tensor, *lengths: Tensor) -> Tensor:
    """``norms``, not finite where one of a record's factors is huge.

    Args:
        norms: ``[count]``, or their squares; overwritten.
        lengths: of the factors, each ``[..., count]``.
    """
    for some in lengths:
        if some.numel() and not float(some.max()) <= HUGE:  # one call, mostly
            huge = (some > HUGE).reshape(-1, some.shape[-1]).any(dim=0)
            norms.masked_fill_(huge, math.inf)
    return norms
