"""The rules for parameters that are added to data, multiplied by data or repeated for each record.

Examples are a scale, a positional embedding and a class token. For a pointwise call with
broadcasting, the gradient of the *broadcast* parameter has the shape of the output; each record's
part of it, summed over the dimensions along which the parameter was repeated, is the record's
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function, name_of
from ownerwise.gradients.contributions import Call, Dense
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.products import Tanh
from ownerwise.gradients.repetition import part_for, use_of
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.taps import Use
from ownerwise.gradients.tracked_parameters import TrackedParameter
from ownerwise.torch_internals import pytree

__all__ = ["POINTWISE", "as_single_record", "pointwise", "repeating", "tanh"]

NAMES = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"),
    *("pow", "float_power", "maximum", "minimum", "fmax", "fmin", "where", "lerp", "addcmul"),
    *("addcdiv", "atan2", "arctan2", "hypot", "logaddexp", "logaddexp2", "xlogy"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__"),
    *("add_", "sub_", "__iadd__", "__isub__"),
)
POINTWISE: list[Function] = [
    getattr(place, name) for name in NAMES for place in (torch, Tensor) if hasattr(place, name)
]


def pointwise(context: Context, func: Function, *args: Any, **kwargs: Any) -> Any:
    """Handle elementwise calls, with broadcasting."""
    if any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented  # includes out=
    places = [(i, context.tracked(a)) for i, a in enumerate(args)]
    uses = [(i, tracked) for i, tracked in places if tracked is not None]
    in_place = name_of(func) in ("add_", "sub_", "__iadd__", "__isub__")
    if in_place and (uses[0][0] == 0 or args[0]._is_view() or args[0].is_leaf):
        return NotImplemented
    values = [context.value(a) for a in args]
    output = func(*values, **kwargs)
    where = f"{name_of(func)}({uses[0][1].name})"
    # the gradient of a sum does not need the operands, so they may change in place afterwards
    additive = in_place or name_of(func) in ("add", "sub", "__add__", "__radd__", "__sub__")
    call = None
    if not additive:
        leaves, spec = pytree.tree_flatten((values, kwargs))
        call = Call(func, leaves, spec, where)

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        for place, tracked in uses:
            if call is not None:
                broadcast = _broadcast_gradient(call, place, gradient)
            else:
                sign = -1 if "sub" in name_of(func) else 1
                factor = sign * kwargs.get("alpha", 1) if place == 1 else 1
                broadcast = gradient if factor == 1 else gradient * factor
            part = part_for(tracked, layout, gradient.dim())
            yield use_of(part, reduced(broadcast, layout, count, tuple(part.tensor.shape), where))

    used = [tracked for _, tracked in uses]
    return context.tap(func, output, used, range(output.dim()), build)


def _broadcast_gradient(call: Call, place: int, gradient: Tensor) -> Tensor:
    """Return the gradient of argument `place` as if it had been broadcast before the call."""
    values = call.values(accumulation_dtype(gradient.dtype))
    with torch.enable_grad():
        full = values[place].expand(gradient.shape).detach().requires_grad_()
        values[place] = full
        again = call(values)
        return torch.autograd.grad(again, full, gradient.to(again.dtype))[0]


def reduced(
    broadcast: Tensor, layout: Layout, count: int, shape: tuple[int, ...], where: str
) -> Dense:
    """Sum a broadcast gradient down to `[count, *shape]`."""
    aligned = (1,) * (broadcast.dim() - len(shape)) + shape
    inside = layout.fold == "major" and aligned[layout.dim] * count == broadcast.shape[layout.dim]
    if layout.fold != "whole" and aligned[layout.dim] != 1 and not inside:
        raise Refused(
            where,
            f"the parameter of shape {list(shape)} has an entry for each of the {count} records",
            "give it the shape of one record and broadcast it, for example with expand",
        )
    parts = layout.records(broadcast, count)
    inner = layout.inner_shape(aligned)
    dims = [i + 1 for i, size in enumerate(inner) if size == 1 and parts.shape[i + 1] != 1]
    if dims:
        parts = parts.sum(dim=dims, dtype=accumulation_dtype(parts.dtype))
    return Dense(parts.reshape(count, *shape))


def repeating(context: Context, func: Function, *args: Any, **kwargs: Any) -> Any:
    """Handle a parameter that is repeated for every record (class token, initial state).

    This applies only if a new dimension has the size of the batch; if the parameter is repeated
    within a record, the result remains a derived parameter. The backward pass checks whether the
    records really lie along the new dimension.
    """
    tracked = context.tracked(args[0])
    if tracked is None or kwargs:
        return NotImplemented
    output = func(tracked.value, *args[1:])
    shape = tuple(tracked.tensor.shape)
    aligned = (1,) * (output.dim() - len(shape)) + shape
    new = [d for d in range(output.dim()) if aligned[d] == 1 and output.shape[d] != 1]
    same = all(output.shape[d] == aligned[d] or d in new for d in range(output.dim()))
    if not same or context.batch_hint not in [output.shape[d] for d in new]:
        return NotImplemented
    if tracked.part is not None:
        parts = (1,) * (output.dim() - len(shape)) + tuple(tracked.part.tensor.shape)
        sizes = zip(parts, aligned, strict=True)
        if any(part != size == context.batch_hint for part, size in sizes):
            return NotImplemented  # it has already been repeated for every record
    return _tap_broadcast(context, func, tracked, output, new)


def as_single_record(context: Context, func: Function, tensor: Tensor) -> Tensor:
    """In a batch of one record, tap a parameter that a rule receives in place of data.

    Expanding a learned state or query to a batch of one record does not change it, so the call
    receives the parameter itself.
    """
    tracked = context.tracked(tensor)
    return tensor if tracked is None else _tap_broadcast(context, func, tracked, tracked.value, [])


def _tap_broadcast(
    context: Context,
    func: Function,
    tracked: TrackedParameter,
    output: Tensor,
    new: list[int],
) -> Tensor:
    where = f"{name_of(func)}({tracked.name})"
    shape = tuple(tracked.tensor.shape)

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        yield tracked, reduced(gradient, layout, count, shape, where)

    # expand shares memory between records; a copy lets the model write to one of them
    return context.tap(func, output.clone(), [tracked], new, build)


def tanh(context: Context, func: Function, input: Tensor, **options: Any) -> Any:
    """Handle `tanh` of data, for which some processors have a faster kernel."""
    if options or context.tracked(input) is not None or context.is_constant(input):
        return NotImplemented
    return Tanh.of(input)
