"""Tensors that repeat a part, computed from parameters and constants, for each record.

Many models look up their position embeddings once for each record: `embedding(positions.expand(B,
L))` has an entry for every record, but the entries are the same function of the parameters. A
record's gradient is therefore that of the *part* `embedding(positions)`, of which the tensor is a
repetition. The part is computed by the same call on one copy of the repeated constants.

Only structure counts as proof, never equal values: two parameters may be equal now and differ after
the next update. A part is known only if (1) a call in `_BY_ROW` reads a constant whose copies are
equal, (2) a parametric tensor is repeated by `expand` or `repeat`, or (3) a call in `_KEPT`, which
treats all entries of the repeated dimension alike, is applied to repetitions and to tensors that
do not extend along that dimension. An entry that depends on a record's place in the batch, as in
`weight[arange(B)]`, has no part: its use is refused, because removing a record would move others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function, name_of, tensors_in, writes_in_place
from ownerwise.gradients.contributions import Contribution, Dense, Lookup
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.tracked_parameters import ParameterTracker, TrackedParameter

__all__ = ["part_for", "register_part", "use_of"]

# Calls that compute each entry of the output from one entry of a constant and from parameters.
_BY_ROW = frozenset(
    (
        *(functional.embedding, functional.linear, torch.einsum, Tensor.__getitem__),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
    )
)
_REPEAT = frozenset(
    (Tensor.expand, Tensor.expand_as, Tensor.repeat, Tensor.broadcast_to, torch.broadcast_to)
)
_POINTWISE = (
    *("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__"),
    *("__rmul__", "__truediv__", "__rtruediv__", "multiply", "divide", "subtract", "neg"),
    *("to", "float", "double", "half", "bfloat16", "type", "clone", "contiguous"),
)
# Calls that move dimensions; the repeated one stays a single dimension.
_MOVES = ("transpose", "permute", "unsqueeze", "swapaxes", "swapdims", "movedim", "moveaxis")
_KEPT = frozenset((*_POINTWISE, *_MOVES))


def register_part(
    tracker: ParameterTracker,
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    count: int | None,
) -> None:
    """Find out whether the output of a call without data repeats a part, and record the part.

    Args:
        tracker: the parametric and constant tensors; `output` is among them.
        func, args, kwargs: the call.
        output: what the call returned.
        count: a guess at the number of records; copies of a constant are sought for this number.
    """
    if not isinstance(output, Tensor) or writes_in_place(func):
        return
    tracked = tracker.parametric.get(id(output))
    if tracked is None or tracked.tensor is not output:
        return
    parents = _parents(tracker, args, kwargs)
    if func in (functional.embedding, Tensor.__getitem__):
        tracked.rows = _rows_read(tracker, func, args, kwargs)
    if func in _REPEAT:
        parent = tracker.parametric.get(id(args[0]))
        if parent is not None:
            parent = parent.part or parent
            if _tiles(parent.tensor, output):
                tracked.part = parent
        return
    if any(parent.part for parent in parents) or func not in _BY_ROW:
        if name_of(func) not in _KEPT:
            return
        reduced = _with_parts(tracker, args, count)
    else:
        reduced = _with_one_copy(tracker, func, args, count)
    if all(new is old for new, old in zip(reduced, args, strict=True)):
        return
    try:
        part = func(*reduced, **kwargs)
    except (RuntimeError, IndexError):  # the call needs the copies
        return
    if isinstance(part, Tensor) and part.requires_grad and _tiles(part, output):
        tracker.derive(func, reduced, kwargs, part)
        found = tracker.parametric[id(part)]
        if tracked.rows is not None:
            found.rows = _rows_read(tracker, func, reduced, kwargs)
        tracked.part = found


def part_for(tracked: TrackedParameter, layout: Layout, dims: int) -> TrackedParameter:
    """Return the tensor of which each record uses the whole: the part, or the tensor itself.

    Args:
        tracked: an argument of a call whose output has the records along `layout`.
        layout: the layout of the output, or of an argument with the same layout.
        dims: the number of dimensions of that tensor, to which the argument is broadcast.
    """
    part = tracked.part
    if part is None or layout.fold == "whole":
        return tracked
    ahead = dims - part.tensor.dim()
    for dim, (size, whole) in enumerate(
        zip(part.tensor.shape, tracked.tensor.shape, strict=True), ahead
    ):
        if size == whole or size == 1:
            continue
        # copies follow each other: copy b of entry i is entry b * size + i
        if dim != layout.dim or layout.fold != "major":
            return tracked
    return part


def use_of(tracked: TrackedParameter, gradients: Dense) -> tuple[TrackedParameter, Contribution]:
    """Return a use with these per-record gradients of a tensor.

    If the tensor consists of rows of a parameter, the use is one of that parameter.
    """
    if tracked.rows is None:
        return tracked, gradients
    root, ids, padding = tracked.rows
    values = gradients.values.reshape(gradients.count, ids.numel(), -1)
    if padding is not None:
        values = values.masked_fill((ids.flatten() == padding)[None, :, None], 0)
    ids = ids.reshape(1, -1).expand(gradients.count, -1)
    return root, Lookup(ids, values, root.tensor.shape[0])


def _parents(tracker: ParameterTracker, args: Any, kwargs: Any) -> list[TrackedParameter]:
    return [
        tracker.parametric[id(t)] for t in tensors_in((args, kwargs)) if id(t) in tracker.parametric
    ]


def _tiles(part: Tensor, whole: Tensor) -> bool:
    """Return whether a tensor has the shape of a repetition of a part."""
    return (
        part.dim() == whole.dim()
        and part.shape != whole.shape
        and all(
            size and full % size == 0 for size, full in zip(part.shape, whole.shape, strict=True)
        )
    )


def _with_parts(
    tracker: ParameterTracker, args: tuple[Any, ...], count: int | None
) -> tuple[Any, ...]:
    """Return the arguments of an elementwise call with parts and single copies."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tracked = tracker.parametric.get(id(value))
        if tracked is None:
            return _one_copy(value, count, range(value.dim()))
        return value if tracked.part is None else tracked.part.tensor

    return tuple(map(replaced, args))


def _with_one_copy(
    tracker: ParameterTracker, func: Function, args: tuple[Any, ...], count: int | None
) -> tuple[Any, ...]:
    """Return the arguments of a call in `_BY_ROW` with one copy of its constant.

    Only dimensions that the call passes on to its output are looked at: the others are summed over.
    """
    place = 1 if func is Tensor.__getitem__ else 0
    passed_on: Sequence[int] | None = None
    if func is torch.einsum:
        place = next((i for i, a in enumerate(args) if _is_constant(tracker, a)), 0)
        passed_on = _passed_on(args, place)
    elif len(args) > place and _is_constant(tracker, args[place]):
        constant: Tensor = args[place]
        integer = not constant.is_floating_point() and constant.dtype != torch.bool
        if func in (functional.embedding, Tensor.__getitem__):
            passed_on = range(constant.dim()) if integer else None
        elif constant.dim() > 1:  # a matrix product
            passed_on = range(constant.dim() - 1)
    if not passed_on:
        return args
    return (*args[:place], _one_copy(args[place], count, passed_on), *args[place + 1 :])


def _is_constant(tracker: ParameterTracker, value: Any) -> bool:
    return isinstance(value, Tensor) and id(value) not in tracker.parametric


def _passed_on(args: tuple[Any, ...], place: int) -> list[int]:
    """Return the dimensions of an operand of einsum whose letters its output has."""
    if not all(isinstance(a, Tensor) for a in args[1:]) or "->" not in str(args[0]):
        return []
    inputs, output = str(args[0]).replace(" ", "").split("->")
    operands = inputs.split(",")
    if "." in inputs or len(operands) != len(args) - 1 or not place:
        return []
    letters = operands[place - 1]
    return [
        dim for dim, letter in enumerate(letters) if letter in output and letters.count(letter) == 1
    ]


def _one_copy(constant: Tensor, count: int | None, dims: Iterable[int]) -> Tensor:
    """Return one of the equal copies along each of the dimensions that have such copies.

    Either all entries of the dimension are equal, or it consists of `count` equal parts.
    """
    found = constant
    for dim in dims:
        size = constant.shape[dim]
        for copies in (size, count):
            if copies is None or copies < 2 or size < copies or size % copies:
                continue
            first = found.narrow(dim, 0, size // copies)
            if torch.equal(found.unflatten(dim, (copies, -1)), _expanded(first, dim, copies)):
                found = first
                break
    return found


def _expanded(first: Tensor, dim: int, copies: int) -> Tensor:
    sizes = list(first.shape)
    return first.unsqueeze(dim).expand(*sizes[:dim], copies, *sizes[dim:])


def _rows_read(
    tracker: ParameterTracker, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TrackedParameter, Tensor, int | None] | None:
    """Return the parameter, the ids and the padding id of a look-up in a matrix, if it is one."""
    if len(args) < 2:
        return None
    if func is functional.embedding:
        ids, weight = args[:2]
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    else:
        weight, ids = args
        padding = None
    root = tracker.parametric.get(id(weight))
    if root is None or not root.is_root or root.tensor.dim() != 2:
        return None
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return None
    rows = len(root.tensor)
    return root, torch.remainder(ids.long(), rows), padding % rows if padding is not None else None
