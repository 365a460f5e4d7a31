"""One use of parameters in a forward pass, and where in the graph its gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ownerwise.gradients.contributions import Contribution
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.sources import Source, name_of

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["Anchor", "Build", "Tap"]

# (gradient of the tapped output, its layout, number of records) -> what it means to each source
Build = Callable[[Tensor, Layout, int], Iterable[tuple[Source, Contribution]]]


class Anchor(torch.autograd.Function):
    """Gives a tensor that needs no gradient a place in the graph, so that one arrives there."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        """The output itself."""
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Nothing: the gradient is taken on arrival, by the tap."""
        return None, None


class Tap:
    """One use of parameters in the forward pass."""

    __slots__ = (
        *("build", "dims", "func", "key", "layout", "number", "shape", "sources"),
        *("tape", "trials"),
    )

    def __init__(
        self,
        tape: Tape,
        func: Callable[..., Any],
        sources: Sequence[Source],
        dims: tuple[int, ...],
        output: Tensor,
        build: Build,
    ) -> None:
        self.tape = tape
        self.func = func
        self.sources = sources
        self.dims = dims
        self.shape = output.shape
        self.number = output.output_nr
        self.build = build
        self.key = (func, *[source.key for source in sources], len(self.shape))
        self.layout: Layout | None = None
        self.trials: list[Layout] = []

    @property
    def name(self) -> str:
        """The call and its parameters, for messages."""
        return f"{name_of(self.func)}({', '.join(source.name for source in self.sources)})"

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradient of the tapped output arrives, before the call's own backward pass."""
        gradient = gradients[self.number]
        if gradient is not None and self.tape.arrive is not None:
            self.tape.arrive(self, gradient)
