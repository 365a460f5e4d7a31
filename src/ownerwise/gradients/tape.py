"""The tape traces a model's forward pass and turns one backward pass into per-record gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.gradients.backward import send_back
from ownerwise.gradients.calls import Function, name_of, tensors_in, writes_in_place
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.observation import Kept, find_layouts
from ownerwise.gradients.per_record_gradients import Collector, PerRecordGradients
from ownerwise.gradients.precision import full_precision
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.recomputation import (
    hooked,
    refuse_reentrant,
    refuse_transformed,
    run_backward,
    stored,
    uncompiled,
    untraced,
)
from ownerwise.gradients.relocation import RELOCATING
from ownerwise.gradients.repetition import register_part
from ownerwise.gradients.rules import (
    RULES,
    WITHOUT_DATA,
    WITHOUT_PARAMETERS,
    Context,
    Rule,
    fallback,
)
from ownerwise.gradients.segments import Segments
from ownerwise.gradients.sketches import Sketcher
from ownerwise.gradients.taps import Arrive, Build, Delivery, Tap
from ownerwise.gradients.tracked_parameters import (
    FACTORIES,
    ParameterTracker,
    TrackedParameter,
)
from ownerwise.gradients.workspace import Workspace

__all__ = ["Tape"]

PARAMETRIC, CONSTANT, DATA = 1, 2, 4  # kinds of tensors among a call's arguments
Kwargs = dict[str, Any]
NESTED = (list, tuple, dict)


class Tape:
    """Computes per-record gradients of an ordinary module.

    Args:
        model: any module; it is not changed, wrapped or hooked.
        lean: whether to save memory at the cost of somewhat slower computation.
        even: whether sums take the same time for records with the factor 0 as for all others.

    The package docstring shows how to use the tape.
    """

    def __init__(self, model: nn.Module, *, lean: bool = False, even: bool = False) -> None:
        self.model = model
        self.lean = lean
        self.even = even
        self.problems: list[Problem] | None = None  # a list while a trial run collects problems
        self._pass: _ForwardPass | None = None  # the last forward pass, until its backward pass
        self._uncompiled: AbstractContextManager = nullcontext()
        # kept between passes
        self._tracker: ParameterTracker | None = None
        self._workspace = Workspace(lean)
        self._delivery = Delivery()
        self._checked: dict[object, bool] = {}
        self._layouts: dict[object, Kept] = {}

    def __enter__(self) -> Tape:
        if self._tracker is None:
            self._tracker = ParameterTracker(self.model)
        else:
            self._tracker.restart(self.model)
        budget = MemoryBudget(lean=self.lean, even=self.even, workspace=self._workspace)
        self._pass = _ForwardPass(
            self._tracker, budget, self._delivery, self._checked, self.problems
        )
        self._uncompiled = uncompiled()
        self._uncompiled.__enter__()
        self._pass.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._pass is not None
        self._pass.__exit__(*error)
        self._uncompiled.__exit__(*error)
        if error[0] is None:
            self._pass.tracker.refuse_replaced()

    def reset(self) -> None:
        """Discard everything recorded in the last forward pass."""
        self._pass = None

    def learn(self, other: Tape) -> None:
        """Take over where another tape of the same model has observed the records.

        This tape confirms what it has learned in its next batch, whose losses may be others.
        """
        for signature, kept in other._layouts.items():
            own = self._layouts.get(signature)
            if own is None or own.layouts != kept.layouts:
                self._layouts[signature] = replace(kept, count=0)

    def backward(self, losses: Tensor, segments: Segments | None = None) -> PerRecordGradients:
        """Run one backward pass through the activations without computing parameter gradients.

        Args:
            losses: `[B]`, one loss per record (`reduction="none"`).
            segments: rows that form one element each, whose gradient is the mean of theirs; by
                default, each row is an element.

        Raises:
            Refused: if records cannot be told apart, or the tape missed a use of a parameter.
        """
        traced = self._traced(losses)
        parameters, taps = traced.tracker.parameters, traced.taps
        weights = torch.ones_like(losses) if segments is None else segments.shares.to(losses)
        collector = Collector(parameters, taps, losses, traced.budget, segments)
        with self._sent_back(traced, losses, weights, collector.arrive):
            return collector.finish()

    def sketches(self, losses: Tensor) -> Tensor:
        """Return random projections of the per-record gradients, float64 `[B, SKETCHES]`.

        Args:
            losses: `[B]`, one loss per record.

        Raises:
            Refused: as in `backward`.
        """
        traced = self._traced(losses)
        sketcher = Sketcher(traced.tracker.parameters, len(losses))
        ones = torch.ones_like(losses)
        with self._sent_back(traced, losses, ones, sketcher.arrive):
            return sketcher.finish()

    def _traced(self, losses: Tensor) -> _ForwardPass:
        """Return the last forward pass."""
        if self._pass is None:
            raise RuntimeError("the tape is empty: run the model inside `with tape:` first")
        if losses.dim() != 1:
            raise ValueError(
                "losses must have one entry per record, shape [B]; "
                f"got {tuple(losses.shape)}. Use reduction='none'"
            )
        return self._pass

    @contextmanager
    def _sent_back(
        self,
        traced: _ForwardPass,
        losses: Tensor,
        weights: Tensor,
        arrive: Arrive,
    ) -> Iterator[None]:
        """Find out where the records lie, and pass the gradients of all taps to `arrive`.

        The context is that for computing norms and sums from them; then the pass is discarded.
        """
        taps, parameters = traced.taps, traced.tracker.parameters
        replay = traced.replay()

        def send(weights: Tensor, arrive: Arrive, *, keep: bool = True) -> None:
            def untraced_arrive(tap: Tap, gradient: Tensor) -> None:
                with untraced(replay):
                    arrive(tap, gradient)

            given = arrive if replay is None else untraced_arrive
            with self._delivery.to(given, last=not keep), replay or nullcontext():
                send_back(self.model, losses, weights, parameters, keep=keep)

        def consume(tap: Tap, gradient: Tensor) -> None:
            arrive(tap, gradient)
            tap.release()

        try:
            with full_precision(losses.device):
                if len(losses) and losses.requires_grad:
                    moved = traced.relocations
                    for problem in find_layouts(taps, self._layouts, losses, send, moved):
                        traced.refuse(Refused(problem.where, problem.what, problem.remedy))
                    send(weights, consume, keep=False)
                yield
        finally:
            self.reset()


class _ForwardPass(Context):
    """Traces one forward pass: finds the rule for each torch function that the model calls.

    Attributes:
        recomputes: whether activations are computed again in the backward pass.
    """

    recomputes = False
    _with_gradients = False  # whether gradients were enabled at the start

    def __enter__(self) -> _ForwardPass:
        self._with_gradients = torch.is_grad_enabled()
        super().__enter__()
        return self

    def replay(self) -> _Replay | None:
        """Return the mode for the backward pass; None if no activations are computed again."""
        if not self.recomputes:
            return None
        problems = None if self.problems is None else []
        replay = _Replay(self.tracker, self.budget, self.delivery, self.checked, problems)
        replay.batch_hint = self.batch_hint
        return replay

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        count = self.batch_hint
        kinds = self._kinds(args)
        if kwargs:
            kinds |= self._kinds(kwargs.values())
        else:
            kwargs = {}
        if kinds & DATA and func in RELOCATING:
            self.relocations.note(func, args, kwargs, count, self.is_data)
        rule = RULES.get(func)
        if kinds == DATA and rule not in WITHOUT_PARAMETERS:  # by far the most common case
            return func(*args, **kwargs)
        try:
            if kinds & PARAMETRIC and torch.is_grad_enabled():
                return self._call_with_gradient(func, rule, args, kwargs, kinds)
            return self._call_without_gradient(func, rule, args, kwargs, kinds)
        except Refused as refusal:
            self.refuse(refusal)
            return func(*args, **kwargs)

    def _kinds(self, values: Iterable[Any]) -> int:
        """Return the kinds of tensor (parametric, constant, data) that occur in the values."""
        parametric, constant = self.tracker.parametric, self.tracker.constant
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

    def _call_with_gradient(
        self, func: Function, rule: Rule | None, args: tuple[Any, ...], kwargs: Kwargs, kinds: int
    ) -> Any:
        """Run a call on parameters; without data, its result is a derived parametric tensor."""
        has_data = bool(kinds & DATA)
        checkpointed = hooked()
        self.recomputes |= checkpointed
        if has_data:
            refuse_transformed(name_of(func))
        if rule is not None and (has_data or rule in WITHOUT_DATA):
            output = rule(self, func, *args, **kwargs)
            if output is not NotImplemented:
                return output
        if has_data:
            return fallback(self, func, args, kwargs)
        written = args[0] if args and writes_in_place(func) else None
        self._refuse_shared_write(func, written)
        with stored(checkpointed):  # the graph of a derived tensor is used apart from the others
            output = func(*args, **kwargs)
            changed = output if written is None else written  # __setitem__ returns None
            self.tracker.derive(func, args, kwargs, changed)
            register_part(self.tracker, func, args, kwargs, output, self.batch_hint)
        return output

    def _refuse_shared_write(self, func: Function, written: Any) -> None:
        if written is not None:
            used = {tracked for tap in self.taps for tracked in tap.used}
            self.tracker.refuse_shared_write(func, written, used)

    def _call_without_gradient(
        self, func: Function, rule: Rule | None, args: tuple[Any, ...], kwargs: Kwargs, kinds: int
    ) -> Any:
        """Run a call through which no parameter gradient flows.

        Its result is constant if it is computed from parameters and constants alone. Data must not
        be written into the model; any other tensor that data is written to becomes data.
        """
        if kinds & PARAMETRIC and self._with_gradients:
            refuse_reentrant(name_of(func))
        if kinds & DATA:
            written = args[0] if args and writes_in_place(func) else kwargs.get("out")
            for tensor in tensors_in(written):
                self.tracker.refuse_write(func, tensor)
                self.tracker.constant.pop(id(tensor), None)
            if rule is not None and rule in WITHOUT_PARAMETERS:
                output = rule(self, func, *args, **kwargs)
                if output is not NotImplemented:
                    return output
            return func(*args, **kwargs)
        if kinds & PARAMETRIC and args and writes_in_place(func):
            self._refuse_shared_write(func, args[0])
        output = func(*args, **kwargs)
        if kinds or func in FACTORIES:
            for tensor in tensors_in(output):
                if id(tensor) not in self.tracker.parametric:
                    self.tracker.constant[id(tensor)] = tensor
        return output


class _Replay(_ForwardPass):
    """Runs calls exactly as in the forward pass, but without tapping their outputs."""

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.autograd.backward:  # what is called within it must be traced
            with self:
                return run_backward(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def tap(
        self,
        func: Function,
        output: Tensor,
        used: Sequence[TrackedParameter],
        dims: Iterable[int],
        build: Build,
    ) -> Tensor:
        """Return the output as part of the graph; see `Context.tap`."""
        return self.anchored(output)[0]
