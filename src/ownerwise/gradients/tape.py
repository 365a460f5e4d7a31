"""The tape: watches a model run, and turns one backward pass into per-record gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ownerwise.gradients.contributions import Policy
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.observation import find_layouts
from ownerwise.gradients.precision import full_precision
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.records import Collector, Records
from ownerwise.gradients.sources import FACTORIES, Source, Sources, name_of, tensors_in
from ownerwise.gradients.taps import Anchor, Build, Tap
from ownerwise.gradients.workspace import Workspace

__all__ = ["BROADCASTS", "FALLBACK", "GUARDS", "RULES", "Tape", "send_back", "writes"]

SOURCE, CONSTANT, DATA = 1, 2, 4  # kinds of tensors among the arguments of a call
NESTED = (list, tuple, dict)


class Tape(TorchFunctionMode):
    """Per-record gradients of an ordinary module.

    Args:
        model: any module; it is not changed, wrapped or hooked.
        lean: spend less memory and somewhat more time.
        channels_last: run 2-D convolutions in channels-last memory format inside (faster; the
            values are the same).
        spare_bytes: how much memory formed per-record gradients may take beyond what they replace
            (ignored when lean).

    See the package docstring for the way it is used.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lean: bool = False,
        channels_last: bool = True,
        spare_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.lean = lean
        self.channels_last = channels_last
        self.spare_bytes = spare_bytes
        self.batch_hint: int | None = None  # size of the first data tensor; a hint, never a proof
        self._workspace = Workspace(lean)
        self.policy = Policy()
        self.problems: list[Problem] | None = None  # a list while a trial run collects problems
        self.checked: dict[object, bool] = {}  # calls of the fallback: whether they are per-record
        self._layouts: dict[object, list[Layout]] = {}
        self._taps: list[Tap] = []
        self._uses: dict[int, list[Source]] = {}
        self._last_pass = False
        self._parametric: dict[int, Source] = {}
        self._constant: dict[int, Tensor] = {}
        self._known: Sources | None = None  # kept between passes
        self._sources: Sources | None = None  # during a pass
        self.arrive: Callable[[Tap, Tensor], None] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    # ---- forward: watching the calls ----

    def __enter__(self) -> Tape:
        self.reset()
        if self._known is None:
            self._known = Sources(self.model)
        else:
            self._known.restart(self.model)
        self._sources = self._known
        self._parametric, self._constant = self._known.parametric, self._known.constant
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._sources is not None:
            self._sources.refuse_replaced()

    def reset(self) -> None:
        """Forget the last forward pass."""
        self._taps, self._uses, self._sources, self.arrive = [], {}, None, None
        self.batch_hint = None
        self.policy = Policy(lean=self.lean, workspace=self._workspace)
        if self.spare_bytes is not None:
            self.policy.spare_bytes = self.spare_bytes

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
        if kinds == DATA:  # by far the most frequent
            guard = GUARDS.get(func)
            if guard is None:
                return func(*args, **kwargs)
            return guard(self, func, *args, **kwargs)
        try:
            if kinds & SOURCE and torch.is_grad_enabled():
                return self._call_with_sources(func, args, kwargs, bool(kinds & DATA))
            return self._call_without_gradient(func, args, kwargs, kinds)
        except Refused as refusal:
            if self.problems is None:
                raise
            self.problems.append(refusal.problem)
            return func(*args, **kwargs)

    def _kinds(self, values: Iterable[Any]) -> int:
        """Which of source, constant and data are among the values."""
        parametric, constant = self._parametric, self._constant
        kinds = 0
        for value in values:
            if isinstance(value, Tensor):
                key = id(value)
                if key in parametric:
                    kinds |= SOURCE
                elif key in constant:
                    kinds |= CONSTANT
                else:
                    kinds |= DATA
                    if self.batch_hint is None and value.dim():
                        self.batch_hint = value.shape[0]
            elif isinstance(value, NESTED):
                kinds |= self._kinds(value.values() if isinstance(value, dict) else value)
        return kinds

    def _call_without_gradient(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kinds: int
    ) -> Any:
        """A call that no gradient of a parameter goes through.

        What it makes of parameters and constants alone is constant.
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
        """Refuse a write of data into the model; any other tensor written to is data from now."""
        assert self._sources is not None
        written = args[0] if args and writes(func) else kwargs.get("out")
        for tensor in tensors_in(written):
            self._sources.refuse_write(func, tensor)
            self._constant.pop(id(tensor), None)

    def _call_with_sources(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_data: bool,
    ) -> Any:
        assert self._sources is not None
        rule = BROADCASTS.get(func)
        if rule is None and has_data:
            rule = RULES.get(func)
        if rule is not None:
            output = rule(self, func, *args, **kwargs)
            if output is not NotImplemented:
                return output
        if has_data:
            return FALLBACK[0](self, func, args, kwargs)
        output = func(*args, **kwargs)
        self._sources.derive(func, list(tensors_in((args, kwargs))), output)
        return output

    # ---- what rules use ----

    def source(self, tensor: Any) -> Source | None:
        """The source behind a tensor, if it is parametric."""
        return self._parametric.get(id(tensor))

    def is_constant(self, tensor: Any) -> bool:
        """Whether a tensor is a buffer, frozen, or made from nothing."""
        return id(tensor) in self._constant

    def value(self, tensor: Any) -> Any:
        """The argument as the call shall see it: parametric tensors without their graph."""
        source = self._parametric.get(id(tensor))
        return tensor if source is None else source.value

    def in_last_pass(self) -> bool:
        """Whether the pass back that runs now is the last: saved tensors may be overwritten."""
        return self._last_pass

    def tap(
        self,
        func: Callable[..., Any],
        output: Tensor,
        sources: Sequence[Source],
        dims: Iterable[int],
        build: Build,
    ) -> Tensor:
        """Have ``build`` called with the gradient of ``output`` as it is now.

        Args:
            func: the torch function, for names.
            output: what the call returned; the same tensor comes back, with a place in the graph.
            sources: the parameters used.
            dims: dimensions of ``output`` along which records may lie.
            build: makes contributions of the gradient.
        """
        if output.grad_fn is None:
            output = Anchor.apply(output, self._anchor)  # type: ignore[assignment]
        tap = Tap(self, func, sources, tuple(dims), output, build)
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(tap)
        self._taps.append(tap)
        for source in sources:
            for root in source.key:
                self._uses.setdefault(root, []).append(source)
        return output

    # ---- backward ----

    def backward(self, losses: Tensor) -> Records:
        """Send the losses back once; activations only, no parameter gradient is formed.

        Args:
            losses: ``[B]``, one loss per record (``reduction="none"``).

        Raises:
            Refused: if records cannot be told apart, or a parameter was used out of sight.
        """
        if self._sources is None:
            raise RuntimeError("the tape is empty: run the model inside `with tape:` first")
        if losses.dim() != 1:
            raise ValueError(
                "losses must have one entry per record, shape [B]; "
                f"got {tuple(losses.shape)}. Use reduction='none'"
            )
        parameters = [source.roots[0] for source in self._sources.roots]
        count = len(losses)
        collector = Collector(parameters, self._uses, count, self.policy, losses.device)
        try:
            with full_precision(losses.device):
                if count and losses.requires_grad:
                    self._find_layouts(losses, parameters)
                    self.arrive = collector.arrive
                    self._run(losses, torch.ones_like(losses), parameters, keep=False)
                return collector.finish()
        finally:
            self.reset()

    def _find_layouts(self, losses: Tensor, parameters: list[nn.Parameter]) -> None:
        def observe(weights: Tensor, arrive: Callable[[Tap, Tensor], None]) -> None:
            self.arrive = arrive
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


def send_back(
    model: nn.Module,
    losses: Tensor,
    weights: Tensor,
    parameters: list[nn.Parameter],
    *,
    keep: bool,
) -> None:
    """One backward pass; a parameter that gets a gradient was used out of sight."""
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    missed = []
    try:
        torch.autograd.backward(losses, weights, retain_graph=keep)
        missed = [p for p in parameters if p.grad is not None]
    finally:
        for parameter in missed:
            parameter.grad = None
        for parameter, gradient in before:
            parameter.grad = gradient
    if missed:
        names = {id(p): name for name, p in model.named_parameters()}
        raise Refused(
            ", ".join(names[id(p)] for p in missed),
            "used where the tape does not see it (outside of the `with` block, in a custom "
            "autograd function, or in compiled code), so it would train without clipping",
            "use it inside the `with` block by torch functions, or freeze it",
        )


def writes(func: Callable[..., Any]) -> bool:
    """Whether a torch function changes its first argument in place."""
    name = name_of(func)
    return (
        name == "__setitem__"
        or name.startswith("__i")
        or (name.endswith("_") and not name.endswith("__"))
    )


# Filled by the rule files; see rules.py.
RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
BROADCASTS: dict[Callable[..., Any], Callable[..., Any]] = {}
GUARDS: dict[Callable[..., Any], Callable[..., Any]] = {}
FALLBACK: list[Callable[..., Any]] = []
