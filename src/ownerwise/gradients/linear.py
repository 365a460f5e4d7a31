"""Matrix products with a parameter: ``linear`` at any rank, ``x @ weight``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import (
    Contribution,
    Dense,
    Saved,
    accumulation_dtype,
)
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.outer import Outer
from ownerwise.gradients.sources import Source
from ownerwise.gradients.vectors import RankOne

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["linear", "matmul", "project"]


def linear(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """Rule of ``linear``."""
    if tape.source(input) is not None:
        return NotImplemented
    return project(tape, func, input, weight, bias)


def project(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """``linear``, tapped."""
    weight_source: Source | None = tape.source(weight)
    bias_source: Source | None = tape.source(bias) if bias is not None else None
    output = functional.linear(input, tape.value(weight), tape.value(bias))
    sources = [s for s in (weight_source, bias_source) if s is not None]
    if not sources:
        return output
    saved = Saved(input, f"linear({sources[0].name})") if weight_source is not None else None
    policy = tape.policy

    def vectors(gradient: Tensor) -> Iterator[tuple[Source, Contribution]]:
        if weight_source is not None and saved is not None:
            yield weight_source, RankOne(gradient, saved.get())
        if bias_source is not None:
            yield bias_source, Dense(gradient)

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        if gradient.dim() == 2 and layout.fold == "none":
            yield from vectors(gradient)
            return
        left = layout.records(gradient, count).reshape(count, -1, gradient.shape[-1])
        if bias_source is not None:
            yield bias_source, Dense(left.sum(dim=1, dtype=accumulation_dtype(left.dtype)))
        if weight_source is not None and saved is not None:
            inputs = layout.records(saved.get(), count).reshape(count, left.shape[1], -1)
            yield weight_source, Outer(left, inputs, policy)

    return tape.tap(func, output, sources, range(output.dim() - 1), build)


def matmul(tape: Tape, func: Callable[..., Any], input: Tensor, other: Tensor) -> Any:
    """Rule of ``input @ other`` with a parametric matrix on the right."""
    source: Source | None = tape.source(other)
    if source is None or tape.source(input) is not None or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    output = func(input, source.value)
    saved = Saved(input, f"matmul({source.name})")
    policy = tape.policy

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        right = layout.records(gradient, count).reshape(count, -1, gradient.shape[-1])
        left = layout.records(saved.get(), count).reshape(count, right.shape[1], -1)
        yield source, Outer(left, right, policy)

    return tape.tap(func, output, [source], range(output.dim() - 1), build)
