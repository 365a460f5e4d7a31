"""One use of parameters in a forward pass, and the graph node that receives its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function, name_of
from ownerwise.gradients.contributions import Contribution
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["Anchor", "Arrive", "Build", "Delivery", "Tap", "Use"]

Use = tuple[TrackedParameter, Contribution]
"""A parametric tensor, and what one use of it contributes to the per-record gradients."""

Build = Callable[[Tensor, Layout, int], Iterator[Use]]
"""Turns a tapped output's gradient, its layout and the number of records into uses."""


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
        delivery: where the gradient of the output goes.
        func: the torch function.
        used: the parameters that the call uses.
        dims: dimensions of the output that may index the records.
        shape: the shape of the output.
        number: the place of the output's gradient among those that its graph node receives.
        build: turns the gradient into uses.
    """

    def __init__(
        self,
        delivery: Delivery,
        func: Function,
        used: Sequence[TrackedParameter],
        dims: tuple[int, ...],
        shape: torch.Size,
        number: int,
        build: Build,
    ) -> None:
        self.delivery = delivery
        self.func = func
        self.used = used
        self.dims = dims
        self.shape = shape
        self.number = number
        self.build: Build = build
        self.key = (func, *[tracked.key for tracked in used], len(self.shape))
        self.layout: Layout | None = None
        self.trials: list[Layout] = []

    @property
    def name(self) -> str:
        """The call and its parameters, as shown in messages."""
        return f"{name_of(self.func)}({', '.join(tracked.name for tracked in self.used)})"

    def release(self) -> None:
        """Forget how the gradient is turned into uses, and with that the tensors saved for it."""
        self.build = _released

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Deliver the gradient of the tapped output, before the call's own backward pass."""
        gradient = gradients[self.number]
        if gradient is not None and self.delivery.arrive is not None:
            self.delivery.arrive(self, gradient.reshape(self.shape))


def _released(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
    raise RuntimeError("the gradient of this output has already been turned into uses")


Arrive = Callable[[Tap, Tensor], None]
"""Receives a tap and the gradient of its output."""


class Delivery:
    """Where a tape's backward pass delivers the gradients of tapped outputs.

    Attributes:
        arrive: receives the gradients; None outside the tape's own backward passes.
        last: whether this backward pass is the last and may thus overwrite saved tensors.
    """

    def __init__(self) -> None:
        self.arrive: Arrive | None = None
        self.last = False
        self.anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def to(self, arrive: Arrive, *, last: bool) -> Iterator[None]:
        """Deliver the gradients to `arrive` during one backward pass."""
        self.arrive, self.last = arrive, last
        try:
            yield
        finally:
            self.arrive, self.last = None, False
