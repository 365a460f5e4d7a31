"""Numerical precision of norms and sums, which determine how much a record can change the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HUGE",
    "accumulation_dtype",
    "autocasts",
    "full_precision",
    "full_products",
    "lengths",
    "masked",
    "row_norms",
    "without_autocast",
    "without_huge",
]

HUGE = 1e9
"""A gradient with a factor longer than this is treated as not finite.

A norm is a product of two lengths. If one factor is this long, the other may be so short that its
squares underflow in float32 although the product does not, and the computed norm would be too
small. d numbers whose squares underflow (below 2.7e-23 each) have a length of at most 2.7e-23
sqrt(d), so below this limit a norm is too small by at most 2.7e-14 sqrt(d): 1e-10 for 10^7 numbers,
which is negligible compared with the smallest clip norm (`ownerwise.mechanisms.SMALLEST_NORM`).
"""


_WIDE = 4096


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for norms and sums: float32 for half-precision models (pitfall 22)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def masked(tensor: Tensor, bad: Tensor) -> Tensor:
    """Return a copy with the records in `bad` set to exactly zero, even if they were inf or nan."""
    return tensor.masked_fill(bad.reshape(-1, *[1] * (tensor.dim() - 1)), 0)


def lengths(tensor: Tensor, count: int) -> Tensor:
    """Return the L2 norm of each record's part of a tensor, `[count]`."""
    return row_norms(tensor.reshape(count, -1).to(accumulation_dtype(tensor.dtype)))


def row_norms(rows: Tensor) -> Tensor:
    """Return the L2 norm of each row of a `[count, numbers]` tensor, as `[count]`.

    Squares that are added one after another may all be rounded in the same direction: a float32
    norm of 4,000,000 equal numbers can be too small by 0.3%. Wide rows are therefore divided into
    parts, whose norms are combined. The relative error stays below 1e-5
    (`ownerwise.step.rounding.NORM_ERROR`).
    """
    width = rows.shape[1]
    if width <= _WIDE:
        return torch.linalg.vector_norm(rows, dim=1)
    whole = width - width % _WIDE
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _WIDE)), dim=2)
    if whole < width:
        rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
        parts = torch.cat([parts, rest], dim=1)
    return row_norms(parts)


def full_precision(device: torch.device) -> AbstractContextManager:
    """Return a context manager for norms and sums: no autocast, and float32 stays float32."""
    products = full_products(device)
    return _both(products, without_autocast(device)) if autocasts(device) else products


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context manager in which autocast is off for a device."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device; some devices do not support it."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def full_products(device: torch.device) -> AbstractContextManager:
    """Return a context manager in which products of float32 numbers are computed in float32.

    Torch may be allowed to compute them in TF32 (11 bits; GPUs) or bfloat16 (8 bits; also some
    CPUs), by `torch.set_float32_matmul_precision` and by settings per kernel.
    """
    reduced = [k for k in _KERNELS.get(device.type, ()) if k.fp32_precision not in _FULL]
    return _at_full_precision(reduced) if reduced else nullcontext()


_FULL = ("ieee", "none")  # "none" is torch's default, which is full precision
_KERNELS: Mapping[str, tuple[Any, ...]] = {
    "cuda": (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.rnn,  # pyright: ignore[reportAttributeAccessIssue]
    ),
    "cpu": (
        torch.backends.mkldnn.matmul,  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.mkldnn.conv,  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.mkldnn.rnn,  # pyright: ignore[reportAttributeAccessIssue]
    ),
}


@contextmanager
def _at_full_precision(kernels: list[Any]) -> Iterator[None]:
    before = [kernel.fp32_precision for kernel in kernels]
    for kernel in kernels:
        kernel.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kernel, precision in zip(kernels, before, strict=True):
            kernel.fp32_precision = precision


@contextmanager
def _both(first: AbstractContextManager, second: AbstractContextManager) -> Iterator[None]:
    with first, second:
        yield


def without_huge(norms: Tensor, *lengths: Tensor) -> Tensor:
    """Set the norm of every record that has a huge factor to infinity.

    Args:
        norms: norms or squared norms, `[count]`; overwritten and returned.
        lengths: the lengths of the factors, each `[..., count]`.
    """
    for factor in lengths:
        if factor.numel() and not float(factor.max()) <= HUGE:  # usually a single call
            huge = (factor > HUGE).reshape(-1, factor.shape[-1]).any(dim=0)
            norms.masked_fill_(huge, math.inf)
    return norms
