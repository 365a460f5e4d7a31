"""The rules for products with a parametric matrix: `linear`, `x @ weight` and `addmm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ownerwise.gradients.calls import Function
from ownerwise.gradients.contributions import Dense, Outer
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.products import Linear
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use

__all__ = ["addmm", "linear", "matmul", "project"]


def linear(
    context: Context, func: Function, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """Handle `linear`."""
    if context.tracked(input) is not None:
        return NotImplemented
    return project(context, func, input, weight, bias)


def project(
    context: Context, func: Function, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Run `linear` on data and tap its output; other rules also use this."""
    matrix, offset = context.tracked(weight), context.tracked(bias)
    output = Linear.of(input, context.value(weight), context.value(bias))
    used = [tracked for tracked in (matrix, offset) if tracked is not None]
    if not used:
        return output
    saved = Saved(input, f"linear({used[0].name})") if matrix is not None else None
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        left = layout.terms(gradient, count)
        if matrix is not None and saved is not None:
            yield matrix, Outer(left, layout.terms(saved.get(), count), budget)
        if offset is not None:
            single = left.shape[1] == 1
            total = left[:, 0] if single else left.sum(1, dtype=accumulation_dtype(left.dtype))
            yield offset, Dense(total)

    return context.tap(func, output, used, range(output.dim() - 1), build)


def matmul(context: Context, func: Function, input: Tensor, other: Tensor) -> Any:
    """Handle `input @ other` with a parametric matrix on the right."""
    matrix = context.tracked(other)
    if matrix is None or context.tracked(input) is not None or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    output = func(input, matrix.value)
    saved = Saved(input, f"matmul({matrix.name})")
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        left, right = layout.terms(saved.get(), count), layout.terms(gradient, count)
        yield matrix, Outer(left, right, budget)

    return context.tap(func, output, [matrix], range(output.dim() - 1), build)


def addmm(
    context: Context, func: Function, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any
) -> Any:
    """Handle `bias + x @ weight`, the layers of GPT-2, with a bias for each column."""
    matrix, offset = context.tracked(mat2), context.tracked(input)
    vector = input.dim() == 1 and len(input) == mat2.shape[1]
    if options or not vector or context.tracked(mat1) is not None:
        return NotImplemented
    if offset is None and not context.is_constant(input):
        return NotImplemented
    output = Linear.of(mat1, context.value(mat2).t(), context.value(input))
    used = [tracked for tracked in (matrix, offset) if tracked is not None]
    saved = Saved(mat1, f"addmm({used[0].name})") if matrix is not None else None
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        right = layout.terms(gradient, count)
        if matrix is not None and saved is not None:
            yield matrix, Outer(layout.terms(saved.get(), count), right, budget)
        if offset is not None:
            yield offset, Dense(right.sum(1, dtype=accumulation_dtype(right.dtype)))

    return context.tap(func, output, used, (0,), build)
