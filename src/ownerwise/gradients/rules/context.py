"""The interface through which a rule uses the tape that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.taps import Build
from ownerwise.gradients.tracked_parameters import TrackedParameter

__all__ = ["Context", "Rule"]

Rule = Callable[..., Any]
"""``rule(context, func, *args, **kwargs)``: run the call, tap its output, and return it.

A rule returns NotImplemented for arguments that it does not support.
"""


class Context(Protocol):
    """The interface that rules use during one forward pass.

    Attributes:
        budget: how much memory contributions may use.
        batch_hint: the length of the first data tensor, as a guess at the number of records.
        checked: for each call that the fallback has tried, whether it treats records separately.
    """

    budget: MemoryBudget
    batch_hint: int | None
    checked: dict[object, bool]

    def tracked(self, tensor: Any) -> TrackedParameter | None:
        """Return the `TrackedParameter` of a tensor, or None if the tensor is not parametric."""
        ...

    def value(self, tensor: Any) -> Any:
        """Return the argument to pass to the call; parametric tensors are detached."""
        ...

    def is_constant(self, tensor: Any) -> bool:
        """Return whether a tensor is a buffer or frozen parameter, or was created without data."""
        ...

    def tap(
        self,
        func: Callable[..., Any],
        output: Tensor,
        used: Sequence[TrackedParameter],
        dims: Iterable[int],
        build: Build,
    ) -> Tensor:
        """Arrange for `build` to receive the gradient with respect to the unmodified `output`.

        Args:
            func: the torch function.
            output: the result of the call; returned as part of the graph.
            used: the parameters that the call uses.
            dims: dimensions of `output` along which records may lie.
            build: turns the gradient into contributions.
        """
        ...

    def in_last_pass(self) -> bool:
        """Return whether this backward pass is the last and may thus overwrite saved tensors."""
        ...

    def watch(self, batch_hint: int) -> AbstractContextManager[None]:
        """Also trace the calls inside a rule, with a different guess at the number of records."""
        ...

    def refuse(self, refusal: Refused) -> None:
        """Raise the error or, in a trial run, add it to the list of problems."""
        ...
