"""One use of parameters in a forward pass, and the graph node that receives its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import name_of
from ownerwise.gradients.contributions import Contribution
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["Anchor", "Build", "Tap"]

Build = Callable[[Tensor, Layout, int], Iterable[tuple[TrackedParameter, Contribution]]]
"""Turns a tapped output's gradient, its layout and the number of records into contributions."""


class Anchor(torch.autograd.Function):
    """Adds a graph node, and thus a gradient, to a tensor that does not require a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        """Return the output itself."""
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Return no gradients, because the tap has already received the gradient."""
        return None, None


class Tap:
    """One use of parameters in the forward pass.

    Args:
        deliver: called with this tap and the gradient of its output.
        func: the torch function.
        used: the parameters that the call uses.
        dims: dimensions of the output that may index the records.
        output: the tapped tensor.
        build: turns the gradient into contributions.
    """

    __slots__ = (
        *("build", "deliver", "dims", "func", "key", "layout", "number", "shape", "trials"),
        "used",
    )

    def __init__(
        self,
        deliver: Callable[[Tap, Tensor], None],
        func: Callable[..., Any],
        used: Sequence[TrackedParameter],
        dims: tuple[int, ...],
        output: Tensor,
        build: Build,
    ) -> None:
        self.deliver = deliver
        self.func = func
        self.used = used
        self.dims = dims
        self.shape = output.shape
        self.number = output.output_nr
        self.build = build
        self.key = (func, *[tracked.key for tracked in used], len(self.shape))
        self.layout: Layout | None = None
        self.trials: list[Layout] = []

    @property
    def name(self) -> str:
        """The call and its parameters, as shown in messages."""
        return f"{name_of(self.func)}({', '.join(tracked.name for tracked in self.used)})"

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Deliver the gradient of the tapped output, before the call's own backward pass."""
        gradient = gradients[self.number]
        if gradient is not None:
            self.deliver(self, gradient)
