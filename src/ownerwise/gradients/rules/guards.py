"""Guards for data-only calls that involve memory formats or batch statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.problems import BATCH_STATISTICS, Refused
from ownerwise.gradients.rules.context import Context

__all__ = ["batch_norm_guard", "strided_guard", "view_guard"]


def view_guard(
    context: Context, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Let ``view`` work on a tensor that is channels-last only because of the convolution rule."""
    if tensor.dim() == 4 and not tensor.is_contiguous():
        try:
            return func(tensor, *args, **kwargs)
        except RuntimeError:
            if not tensor.is_contiguous(memory_format=torch.channels_last):
                raise
            return func(tensor.contiguous(), *args, **kwargs)
    return func(tensor, *args, **kwargs)


def strided_guard(
    context: Context, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Reject ``as_strided`` where the convolution rule may have changed the memory format."""
    if not tensor.is_contiguous():
        raise Refused(
            "as_strided",
            "its result depends on the memory format of its input",
            "call contiguous() first, or use view, unfold or indexing",
        )
    return func(tensor, *args, **kwargs)


def batch_norm_guard(
    context: Context, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Reject batch statistics even in a batch norm without parameters."""
    if kwargs.get("training", args[4] if len(args) > 4 else False):
        context.refuse(
            Refused("batch_norm", BATCH_STATISTICS, "use layer_norm, or group_norm on images")
        )
    return func(input, *args, **kwargs)
