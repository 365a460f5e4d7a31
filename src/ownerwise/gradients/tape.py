"""The tape traces a model's forward pass and turns one backward pass into per-record gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ownerwise.gradients.backward import send_back
from ownerwise.gradients.calls import tensors_in, writes_in_place
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.observation import find_layouts
from ownerwise.gradients.per_record_gradients import Collector, PerRecordGradients
from ownerwise.gradients.precision import full_precision
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.rules import BROADCASTS, GUARDS, RULES, fallback
from ownerwise.gradients.taps import Anchor, Build, Tap
from ownerwise.gradients.tracked_parameters import FACTORIES, ParameterTracker, TrackedParameter
from ownerwise.gradients.workspace import Workspace

__all__ = ["Tape"]

PARAMETRIC, CONSTANT, DATA = 1, 2, 4  # kinds of tensors among a call's arguments
NESTED = (list, tuple, dict)


class Tape(TorchFunctionMode):
    """Computes per-record gradients of an ordinary module.

    Args:
        model: any module; it is not changed, wrapped or hooked.
        lean: whether to save memory at the cost of somewhat slower computation.

    The package docstring shows how to use the tape. Rules use the tape through the interface
    :class:`~ownerwise.gradients.rules.Context`.
    """

    def __init__(self, model: nn.Module, *, lean: bool = False) -> None:
        super().__init__()
        self.model = model
        self.lean = lean
        self.batch_hint: int | None = None
        self._workspace = Workspace(lean)
        self.budget = MemoryBudget()
        self.problems: list[Problem] | None = None  # a list while a trial run collects problems
        self.checked: dict[object, bool] = {}
        self._layouts: dict[object, list[Layout]] = {}
        self._taps: list[Tap] = []
        self._uses: dict[int, list[TrackedParameter]] = {}
        self._last_pass = False
        self._parametric: dict[int, TrackedParameter] = {}
        self._constant: dict[int, Tensor] = {}
        self._known: ParameterTracker | None = None  # kept between passes
        self._tracker: ParameterTracker | None = None  # during a pass
        self._arrive: Callable[[Tap, Tensor], None] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    # ---- forward: watching the calls ----

    def __enter__(self) -> Tape:
        self.reset()
        if self._known is None:
            self._known = ParameterTracker(self.model)
        else:
            self._known.restart(self.model)
        self._tracker = self._known
        self._parametric, self._constant = self._known.parametric, self._known.constant
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._tracker is not None:
            self._tracker.refuse_replaced()

    def reset(self) -> None:
        """Discard everything recorded in the last forward pass."""
        self._taps, self._uses, self._tracker, self._arrive = [], {}, None, None
        self.batch_hint = None
        self.budget = MemoryBudget(lean=self.lean, workspace=self._workspace)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kinds = self._kinds(args)
        if kwargs:
            kinds |= self._kinds(kwargs.values())
        else:
            kwargs = {}
        if kinds == DATA:  # by far the most common case
            guard = GUARDS.get(func)
            if guard is None:
                return func(*args, **kwargs)
            return guard(self, func, *args, **kwargs)
        try:
            if kinds & PARAMETRIC and torch.is_grad_enabled():
                return self._call_with_parameters(func, args, kwargs, bool(kinds & DATA))
            return self._call_without_gradient(func, args, kwargs, kinds)
        except Refused as refusal:
            self.refuse(refusal)
            return func(*args, **kwargs)

    def _kinds(self, values: Iterable[Any]) -> int:
        """Return which kinds of tensors (parametric, constant, data) are among the values."""
        parametric, constant = self._parametric, self._constant
        kinds = 0
        for value in values:
            if isinstance(value, Tensor):
                key = id(value)
                if key in parametric:
                    kinds |= PARAMETRIC
                elif key in constant:
                    kinds |= CONSTANT
                else:
                    kinds |= DATA
                    if self.batch_hint is None and value.dim():
                        self.batch_hint = value.shape[0]
            elif isinstance(value, NESTED):
                kinds |= self._kinds(tensors_in(value))
        return kinds

    def _call_without_gradient(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kinds: int
    ) -> Any:
        """Run a call through which no parameter gradient flows.

        Its result is constant if it is computed from parameters and constants alone.
        """
        if kinds & DATA:
            self._note_write(func, args, kwargs)
            guard = GUARDS.get(func)
            if guard is not None:
                return guard(self, func, *args, **kwargs)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if kinds or func in FACTORIES:
            self._note_constants(output)
        return output

    def _note_constants(self, output: Any) -> None:
        for tensor in tensors_in(output):
            if id(tensor) not in self._parametric:
                self._constant[id(tensor)] = tensor

    def _note_write(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Reject calls that write data into the model; any other tensor written to becomes data."""
        assert self._tracker is not None
        written = args[0] if args and writes_in_place(func) else kwargs.get("out")
        for tensor in tensors_in(written):
            self._tracker.refuse_write(func, tensor)
            self._constant.pop(id(tensor), None)

    def _call_with_parameters(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_data: bool,
    ) -> Any:
        assert self._tracker is not None
        rule = BROADCASTS.get(func)
        if rule is None and has_data:
            rule = RULES.get(func)
        if rule is not None:
            output = rule(self, func, *args, **kwargs)
            if output is not NotImplemented:
                return output
        if has_data:
            return fallback(self, func, args, kwargs)
        output = func(*args, **kwargs)
        self._tracker.derive(func, args, kwargs, output)
        return output

    # ---- the interface for rules; see Context ----

    def tracked(self, tensor: Any) -> TrackedParameter | None:
        """Return the `TrackedParameter` of a tensor, or None if the tensor is not parametric."""
        return self._parametric.get(id(tensor))

    def is_constant(self, tensor: Any) -> bool:
        """Return whether a tensor is a buffer or frozen parameter, or was created without data."""
        return id(tensor) in self._constant

    def value(self, tensor: Any) -> Any:
        """Return the argument to pass to the call; parametric tensors are detached."""
        tracked = self._parametric.get(id(tensor))
        return tensor if tracked is None else tracked.value

    def in_last_pass(self) -> bool:
        """Return whether the current backward pass is the last one."""
        return self._last_pass

    @contextmanager
    def watch(self, batch_hint: int) -> Iterator[None]:
        """Also trace the calls inside a rule, with a different guess at the number of records."""
        before, self.batch_hint = self.batch_hint, batch_hint
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)
            self.batch_hint = before

    def refuse(self, refusal: Refused) -> None:
        """Raise the error or, in a trial run, add it to the list of problems."""
        if self.problems is None:
            raise refusal
        self.problems.append(refusal.problem)

    def tap(
        self,
        func: Callable[..., Any],
        output: Tensor,
        used: Sequence[TrackedParameter],
        dims: Iterable[int],
        build: Build,
    ) -> Tensor:
        """Arrange for `build` to receive the gradient with respect to the unmodified `output`."""
        if output.grad_fn is None:
            output = Anchor.apply(output, self._anchor)  # type: ignore[assignment]
        tap = Tap(self._deliver, func, used, tuple(dims), output, build)
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(tap)
        self._taps.append(tap)
        for tracked in used:
            for root in tracked.key:
                self._uses.setdefault(root, []).append(tracked)
        return output

    def _deliver(self, tap: Tap, gradient: Tensor) -> None:
        if self._arrive is not None:
            self._arrive(tap, gradient)

    # ---- backward ----

    def backward(self, losses: Tensor) -> PerRecordGradients:
        """Run one backward pass through the activations without computing parameter gradients.

        Args:
            losses: ``[B]``, one loss per record (``reduction="none"``).

        Raises:
            Refused: if records cannot be told apart, or the tape missed a use of a parameter.
        """
        if self._tracker is None:
            raise RuntimeError("the tape is empty: run the model inside `with tape:` first")
        if losses.dim() != 1:
            raise ValueError(
                "losses must have one entry per record, shape [B]; "
                f"got {tuple(losses.shape)}. Use reduction='none'"
            )
        parameters = [root.roots[0] for root in self._tracker.roots]
        count = len(losses)
        collector = Collector(parameters, self._uses, count, self.budget, losses.device)
        try:
            with full_precision(losses.device):
                if count and losses.requires_grad:
                    self._find_layouts(losses, parameters)
                    self._arrive = collector.arrive
                    self._run(losses, torch.ones_like(losses), parameters, keep=False)
                return collector.finish()
        finally:
            self.reset()

    def _find_layouts(self, losses: Tensor, parameters: list[nn.Parameter]) -> None:
        def observe(weights: Tensor, arrive: Callable[[Tap, Tensor], None]) -> None:
            self._arrive = arrive
            self._run(losses, weights, parameters, keep=True)

        problems = find_layouts(self._taps, self._layouts, losses, observe)
        if problems and self.problems is None:
            raise Refused(problems[0].where, problems[0].what, problems[0].remedy)
        if self.problems is not None:
            self.problems += problems

    def _run(
        self, losses: Tensor, weights: Tensor, parameters: list[nn.Parameter], keep: bool
    ) -> None:
        try:
            self._last_pass = not keep
            send_back(self.model, losses, weights, parameters, keep=keep)
        finally:
            self._last_pass = False
