"""The rule for convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.contributions import Contribution, Convolved, Dense, Geometry
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["convolution"]


def convolution(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Handle ``conv1d``, ``conv2d`` and ``conv3d``."""
    tracked_weight = context.tracked(weight)
    tracked_bias = context.tracked(bias)
    if context.tracked(input) is not None or input.dim() != weight.dim():
        return NotImplemented
    kernel = context.value(weight)
    if input.dim() == 4:
        input = input.contiguous(memory_format=torch.channels_last)
        if input.is_contiguous():  # one channel or one pixel: only the kernel can show the format
            kernel = kernel.clone(memory_format=torch.channels_last)
    output = func(input, kernel, context.value(bias), stride, padding, dilation, groups)
    name = f"convolution({(tracked_weight or tracked_bias).name})"  # type: ignore[union-attr]
    saved = Saved(input, name) if tracked_weight is not None else None
    geometry = Geometry(tuple(weight.shape), stride, padding, dilation, groups)
    budget = context.budget

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[TrackedParameter, Contribution]]:
        if tracked_bias is not None:
            parts = layout.records(gradient, count)
            parts = parts.reshape(count, -1, *gradient.shape[1:])
            dims = [1, *range(3, parts.dim())]
            yield tracked_bias, Dense(parts.sum(dims, dtype=accumulation_dtype(parts.dtype)))
        if tracked_weight is not None and saved is not None:
            inputs = saved.get()
            if layout.fold == "minor":
                inputs = layout.records(inputs, count).flatten(0, 1)
                gradient = layout.records(gradient, count).flatten(0, 1)
            yield tracked_weight, Convolved(inputs, gradient, count, geometry, budget)

    used = [s for s in (tracked_weight, tracked_bias) if s is not None]
    return context.tap(func, output, used, (0,), build)
