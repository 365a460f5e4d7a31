"""Guards for data-only calls that depend on the memory format of their input.

The convolution rule makes its inputs, and thus its outputs, channels-last. The rules for attention
and recurrent layers may return other formats than torch, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.rules.context import Context

__all__ = ["as_strided", "view"]


def view(context: Context, func: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Let `view` work on a tensor that is channels-last only because of the convolution rule."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return NotImplemented
    try:
        return func(tensor, *args, **kwargs)
    except RuntimeError:
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            raise
        return func(tensor.contiguous(), *args, **kwargs)


def as_strided(context: Context, func: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reject `as_strided` where a rule may have changed the memory format."""
    if tensor.is_contiguous() or not context.reformatted:
        return NotImplemented
    raise Refused(
        "as_strided",
        "its result depends on the memory format of its input",
        "call contiguous() first, or use view, unfold or indexing",
    )
