"""Parameters used outside of layers: added, multiplied, broadcast to the batch.

Scale, bias, positional embedding, class token. For an entry-by-entry call with broadcasting, the
gradient with respect to the *broadcast* parameter has the shape of the output; each record's part
of it, summed over the dimensions along which the parameter was repeated, is the record's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ownerwise.gradients.contributions import Contribution, Dense, Saved, accumulation_dtype
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.sources import Source, name_of

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["POINTWISE", "REPEATING", "as_single_record", "pointwise", "repeating", "spread"]

NAMES = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide"),
    *("pow", "float_power", "maximum", "minimum", "fmax", "fmin", "where", "lerp", "addcmul"),
    *("addcdiv", "atan2", "arctan2", "hypot", "logaddexp", "logaddexp2", "xlogy"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__"),
    *("add_", "sub_", "__iadd__", "__isub__"),
)
POINTWISE: list[Callable[..., Any]] = [
    getattr(place, name) for name in NAMES for place in (torch, Tensor) if hasattr(place, name)
]
REPEATING: list[Callable[..., Any]] = [
    Tensor.expand, Tensor.expand_as, Tensor.repeat, Tensor.broadcast_to, torch.broadcast_to,
]  # fmt: skip


def pointwise(tape: Tape, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rule of calls that work entry by entry, with broadcasting."""
    if any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented  # includes out=
    places = [(i, tape.source(a)) for i, a in enumerate(args)]
    found = [(i, source) for i, source in places if source is not None]
    in_place = name_of(func) in ("add_", "sub_", "__iadd__", "__isub__")
    if in_place and (found[0][0] == 0 or args[0]._is_view() or args[0].is_leaf):
        return NotImplemented
    values = [tape.value(a) for a in args]
    output = func(*values, **kwargs)
    where = f"{name_of(func)}({found[0][1].name})"
    # additions need no operand back, so theirs may change in place afterwards
    additive = in_place or name_of(func) in ("add", "sub", "__add__", "__radd__", "__sub__")
    saved = [Saved(v, where) if isinstance(v, Tensor) and not additive else v for v in values]

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        for place, source in found:
            if additive:
                spread = _additive(func, gradient, place, kwargs)
            else:
                spread = _spread_gradient(func, saved, kwargs, place, gradient)
            yield source, reduced(spread, layout, count, tuple(source.value.shape), where)

    sources = [source for _, source in found]
    return tape.tap(func, output, sources, range(output.dim()), build)


def _additive(
    func: Callable[..., Any], gradient: Tensor, place: int, kwargs: dict[str, Any]
) -> Tensor:
    factor = kwargs.get("alpha", 1) if place == 1 else 1
    if "sub" in name_of(func) and place == 1:
        factor = -factor
    return gradient if factor == 1 else gradient * factor


def _spread_gradient(
    func: Callable[..., Any],
    saved: list[Any],
    kwargs: dict[str, Any],
    place: int,
    gradient: Tensor,
) -> Tensor:
    """The gradient with respect to argument ``place``, had it been broadcast beforehand."""
    values = [v.get() if isinstance(v, Saved) else v for v in saved]
    dtype = accumulation_dtype(gradient.dtype)
    values = [v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]
    with torch.enable_grad():
        full = values[place].expand(gradient.shape).detach().requires_grad_()
        values[place] = full
        again = func(*values, **kwargs)
        return torch.autograd.grad(again, full, gradient.to(again.dtype))[0]


def reduced(
    spread: Tensor, layout: Layout, count: int, shape: tuple[int, ...], where: str
) -> Dense:
    """Sum a broadcast gradient to ``[count, *shape]``."""
    aligned = (1,) * (spread.dim() - len(shape)) + shape
    if layout.fold != "whole" and aligned[layout.dim] != 1:
        raise Refused(
            where,
            f"the parameter of shape {list(shape)} has an entry for each of the {count} records",
            "make it of one record and broadcast it, e.g. by expand",
        )
    parts = layout.records(spread, count)
    inner = layout.inner_shape(aligned)
    dims = [i + 1 for i, size in enumerate(inner) if size == 1 and parts.shape[i + 1] != 1]
    if dims:
        parts = parts.sum(dim=dims, dtype=accumulation_dtype(parts.dtype))
    return Dense(parts.reshape(count, *shape))


def repeating(tape: Tape, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rule of a parameter repeated for every record (class token, initial state).

    Only if a new dimension has the size of the batch; a repetition within the record stays a
    derived parameter. Whether it really was the batch is observed in the backward pass.
    """
    source: Source | None = tape.source(args[0])
    if source is None or kwargs:
        return NotImplemented
    output = func(source.value, *args[1:])
    shape = tuple(source.value.shape)
    aligned = (1,) * (output.dim() - len(shape)) + shape
    new = [d for d in range(output.dim()) if aligned[d] == 1 and output.shape[d] != 1]
    same = all(output.shape[d] in (aligned[d],) or d in new for d in range(output.dim()))
    if not same or tape.batch_hint is None or tape.batch_hint not in [output.shape[d] for d in new]:
        return NotImplemented
    return _tap_spread(tape, func, source, output, new)


def spread(tape: Tape, func: Callable[..., Any], tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor expanded to a shape whose first dimension is that of the records, tapped."""
    source: Source | None = tape.source(tensor)
    output = tape.value(tensor).expand(shape)
    return output if source is None else _tap_spread(tape, func, source, output, [0])


def as_single_record(tape: Tape, func: Callable[..., Any], tensor: Tensor) -> Tensor:
    """A parameter where a rule expects the data of a batch of one record, tapped.

    Expanding a learned state or query to one record leaves it as it is, so it is still a parameter.
    """
    source: Source | None = tape.source(tensor)
    return tensor if source is None else _tap_spread(tape, func, source, source.value, [])


def _tap_spread(
    tape: Tape, func: Callable[..., Any], source: Source, output: Tensor, new: list[int]
) -> Tensor:
    where = f"{name_of(func)}({source.name})"
    shape = tuple(source.value.shape)

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        yield source, reduced(gradient, layout, count, shape, where)

    # expand shares memory between records; a copy lets the model write to one of them
    return tape.tap(func, output.clone(), [source], new, build)
