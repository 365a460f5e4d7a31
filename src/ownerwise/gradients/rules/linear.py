"""The rules for matrix products with a parameter: ``linear`` at any rank and ``x @ weight``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import Contribution, Dense, Outer, RankOne
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["linear", "matmul", "project"]


def linear(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """Handle ``linear``."""
    if context.tracked(input) is not None:
        return NotImplemented
    return project(context, func, input, weight, bias)


def project(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Run ``linear`` on data and tap its output; other rules also use this."""
    tracked_weight = context.tracked(weight)
    tracked_bias = context.tracked(bias)
    output = functional.linear(input, context.value(weight), context.value(bias))
    used = [tracked for tracked in (tracked_weight, tracked_bias) if tracked is not None]
    if not used:
        return output
    saved = Saved(input, f"linear({used[0].name})") if tracked_weight is not None else None
    budget = context.budget

    def vectors(gradient: Tensor) -> Iterator[tuple[TrackedParameter, Contribution]]:
        if tracked_weight is not None and saved is not None:
            yield tracked_weight, RankOne(gradient, saved.get())
        if tracked_bias is not None:
            yield tracked_bias, Dense(gradient)

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[TrackedParameter, Contribution]]:
        if gradient.dim() == 2 and layout.fold == "none":
            yield from vectors(gradient)
            return
        left = layout.records(gradient, count).reshape(count, -1, gradient.shape[-1])
        if tracked_bias is not None:
            yield tracked_bias, Dense(left.sum(dim=1, dtype=accumulation_dtype(left.dtype)))
        if tracked_weight is not None and saved is not None:
            inputs = layout.records(saved.get(), count).reshape(count, left.shape[1], -1)
            yield tracked_weight, Outer(left, inputs, budget)

    return context.tap(func, output, used, range(output.dim() - 1), build)


def matmul(context: Context, func: Callable[..., Any], input: Tensor, other: Tensor) -> Any:
    """Handle ``input @ other`` with a parametric matrix on the right."""
    tracked = context.tracked(other)
    if tracked is None or context.tracked(input) is not None or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    output = func(input, tracked.value)
    saved = Saved(input, f"matmul({tracked.name})")
    budget = context.budget

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[TrackedParameter, Contribution]]:
        right = layout.records(gradient, count).reshape(count, -1, gradient.shape[-1])
        left = layout.records(saved.get(), count).reshape(count, right.shape[1], -1)
        yield tracked, Outer(left, right, budget)

    return context.tap(func, output, [tracked], range(output.dim() - 1), build)
