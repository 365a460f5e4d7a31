"""The rule for calls that no other rule handles: the call is repeated for every record.

The outputs and gradients of the repeated calls are first compared with those of the whole call; a
call that does not treat records separately is rejected.

In some batches, an argument may happen to have as many entries as the batch has records. Constants
are therefore sliced only if the comparison fails without slicing, and every choice of slices is
compared separately. The weighted sum uses the same gradients as the norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function, name_of, writes_in_place
from ownerwise.gradients.contributions import Call, Repeated
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.repetition import part_for
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.taps import Use
from ownerwise.torch_internals import pytree

__all__ = ["fallback"]

# Calls that read a tensor's properties without differentiating through it.
UNDIFFERENTIATED = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.type),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full),
        *(Tensor.new_tensor, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.type_as),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.is_tensor, torch.numel),
    )
)


def fallback(context: Context, func: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle calls that no other rule handles."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [(i, context.tracked(v)) for i, v in enumerate(leaves) if isinstance(v, Tensor)]
    used = [(i, tracked) for i, tracked in tensors if tracked is not None]
    where = f"{name_of(func)}({', '.join(tracked.name for _, tracked in used)})"
    if writes_in_place(func) or kwargs.get("out") is not None:
        raise Refused(
            where,
            "a parameter is written in place into a tensor that contains data",
            "use an out-of-place call (torch.cat, torch.where, +)",
        )
    if func in UNDIFFERENTIATED or name_of(func) == "__get__":
        return func(*args, **kwargs)
    if func is Tensor.to and context.tracked(args[0]) is None:  # x.to(parameter) uses only its type
        return func(*args, **kwargs)
    values = [context.value(v) if isinstance(v, Tensor) else v for v in leaves]
    inner_args, inner_kwargs = pytree.tree_unflatten(values, spec)
    output = func(*inner_args, **inner_kwargs)
    if not isinstance(output, Tensor):
        raise Refused(
            where,
            "the call returns several results, and no rule covers it",
            "use a layer that a rule covers, or freeze the parameter",
        )
    if not (output.is_floating_point() or output.is_complex()):
        return output  # comparisons and similar calls have no gradient
    if output._is_view() or any(output is value for value in values):
        output = output.clone()  # the tapped tensor must belong to the call
    call = Call(func, values, spec, where)
    parametric = {i for i, _ in used}
    constant = {i for i, v in enumerate(leaves) if context.is_constant(v)}
    plain = tuple(repr(v) for v in leaves if not isinstance(v, Tensor))
    budget, checked = context.budget, context.checked

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        given = {place: part_for(tracked, layout, tracked.tensor.dim()) for place, tracked in used}
        parts = {p: given[p].value for p, tracked in used if given[p] is not tracked}
        dims = _dims_in_einsum(leaves, layout) if func is torch.einsum else None
        for place, tracked in given.items():
            if not values[place].is_floating_point():
                continue
            for fixed in (parametric | constant, parametric):
                use = Repeated(call, place, fixed, gradient, layout, count, budget, parts, dims)
                key = (func, plain, place, tracked.key, layout, tuple(use.sliced), tuple(parts))
                if _is_separate(use, key, checked):
                    break
            else:
                raise Refused(
                    where,
                    "the call gives a different result on a single record than on the batch",
                    "use a layer that a rule covers, or a call that treats each record separately",
                )
            yield tracked, use

    return context.tap(func, output, [tracked for _, tracked in used], range(output.dim()), build)


def _dims_in_einsum(leaves: list[Any], layout: Layout) -> dict[int, int] | None:
    """Return the dimension of each operand that has the letter of the records in the output."""
    if not leaves or not isinstance(leaves[0], str) or "->" not in leaves[0]:
        return None
    inputs, output = leaves[0].replace(" ", "").split("->")
    if "." in inputs or layout.dim >= len(output):
        return None
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    letter = output[layout.dim]
    return {
        i: o.find(letter) for i, o in zip(places, inputs.split(","), strict=True) if letter in o
    }


def _is_separate(use: Repeated, key: object, checked: dict[object, bool]) -> bool:
    """Return whether a call treats records separately, as determined in this batch or an earlier
    one.

    A batch without usable gradients proves nothing, so its result is not kept.
    """
    if key in checked:
        return checked[key]
    separate, conclusive = use.compare()
    if conclusive:
        checked[key] = separate
    return separate
