"""One forward pass, as the rules see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ownerwise.gradients.calls import Function
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.relocation import Relocations
from ownerwise.gradients.taps import Anchor, Build, Delivery, Tap
from ownerwise.gradients.tracked_parameters import ParameterTracker, TrackedParameter

__all__ = ["Context", "Rule"]

Rule = Callable[..., Any]
"""`rule(context, func, *args, **kwargs)`: run the call, tap its output, and return it.

A rule returns NotImplemented for arguments that it does not support.
"""


class Context(TorchFunctionMode):
    """What one forward pass has recorded so far, and how rules add to it.

    Attributes:
        tracker: the parametric and constant tensors.
        budget: how much memory contributions may use.
        delivery: what happens to the gradients of tapped outputs.
        checked: for each call that the fallback has tried, whether it treats records separately.
        problems: in a trial run, the problems found so far; otherwise None.
        taps: the uses of parameters, in the order of the calls.
        batch_hint: the length of the first data tensor, as a guess at the number of records.
        relocations: what may have put the records in another order.
        reformatted: whether a rule may have changed the memory format of a tensor.
        selected: tensors made by `index_select`, with the dimension and the index, keyed by id.
        packings: the batch sizes of packed sequences, with the order of the records, keyed by id.
    """

    def __init__(
        self,
        tracker: ParameterTracker,
        budget: MemoryBudget,
        delivery: Delivery,
        checked: dict[object, bool],
        problems: list[Problem] | None,
    ) -> None:
        super().__init__()
        self.tracker = tracker
        self.budget = budget
        self.delivery = delivery
        self.checked = checked
        self.problems = problems
        self.taps: list[Tap] = []
        self.batch_hint: int | None = None
        self.reformatted = False
        self.relocations = Relocations()
        self.selected: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self.packings: dict[int, tuple[Tensor, Tensor]] = {}

    def tracked(self, tensor: Any) -> TrackedParameter | None:
        """Return the `TrackedParameter` of a tensor, or None if the tensor is not parametric."""
        return self.tracker.parametric.get(id(tensor))

    def value(self, tensor: Any) -> Any:
        """Return the argument to pass to the call; parametric tensors are detached."""
        tracked = self.tracked(tensor)
        return tensor if tracked is None else tracked.value

    def is_constant(self, tensor: Any) -> bool:
        """Return whether a tensor is a buffer or frozen parameter, or does not depend on data."""
        return id(tensor) in self.tracker.constant

    def tap(
        self,
        func: Function,
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
        output, node = self.anchored(output)
        tap = Tap(self.delivery, func, used, tuple(dims), output.shape, node.output_nr, build)
        assert node.grad_fn is not None
        node.grad_fn.register_prehook(tap)
        self.taps.append(tap)
        return output

    def anchored(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the tensor with the same numbers that receives its gradient.

        Some calls return a view of a tensor that nothing else refers to (`linear` with three
        dimensions, `embedding`). An in-place change of the view replaces the view's graph node, but
        not that of the underlying tensor, which therefore receives the gradient.
        """
        node = output
        if output._is_view():
            base = output._base
            assert base is not None
            if base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous():
                node = base
            else:
                node = output = output.clone()
        if node.grad_fn is None:
            anchored: Any = Anchor.apply(node, self.delivery.anchor)
            output, node = (anchored if output is node else output), anchored
        assert output.grad_fn is not None  # torch gives a view its new node when asked for it
        return output, node

    @contextmanager
    def watch(self, batch_hint: int) -> Iterator[None]:
        """Also trace the calls inside a rule, with a different guess at the number of records."""
        before, self.batch_hint = self.batch_hint, batch_hint
        try:
            with self:
                yield
        finally:
            self.batch_hint = before

    def is_data(self, tensor: Any) -> bool:
        """Return whether a tensor is neither parametric nor constant."""
        return not (self.is_constant(tensor) or id(tensor) in self.tracker.parametric)

    def refuse(self, refusal: Refused) -> None:
        """Raise the error or, in a trial run, add it to the list of problems."""
        if self.problems is None:
            raise refusal
        self.problems.append(refusal.problem)
