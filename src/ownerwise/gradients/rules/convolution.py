"""The rule for convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function
from ownerwise.gradients.contributions import Convolved, Dense, Geometry
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use

__all__ = ["convolution"]


def convolution(
    context: Context,
    func: Function,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Handle `conv1d`, `conv2d` and `conv3d`."""
    kernel, offset = context.tracked(weight), context.tracked(bias)
    if context.tracked(input) is not None or input.dim() != weight.dim():
        return NotImplemented
    value = context.value(weight)
    if input.dim() == 4:
        context.reformatted = True
        input = input.contiguous(memory_format=torch.channels_last)
        if input.is_contiguous():  # one channel or pixel: only the kernel can convey the format
            value = value.clone(memory_format=torch.channels_last)
    output = func(input, value, context.value(bias), stride, padding, dilation, groups)
    used = [tracked for tracked in (kernel, offset) if tracked is not None]
    saved = Saved(input, f"convolution({used[0].name})") if kernel is not None else None
    geometry = Geometry(tuple(weight.shape), stride, padding, dilation, groups)
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        if offset is not None:
            parts = layout.records(gradient, count).reshape(count, -1, *gradient.shape[1:])
            dims = [1, *range(3, parts.dim())]
            yield offset, Dense(parts.sum(dims, dtype=accumulation_dtype(parts.dtype)))
        if kernel is not None and saved is not None:
            inputs = saved.get()
            if layout.fold == "minor":
                inputs = layout.records(inputs, count).flatten(0, 1)
                gradient = layout.records(gradient, count).flatten(0, 1)
            yield kernel, Convolved(inputs, gradient, count, geometry, budget)

    return context.tap(func, output, used, (0,), build)
