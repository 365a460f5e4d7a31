"""Repeat in float32 what a model computes from its parameters in half precision.

The sum of the clipped gradients is propagated from a derived tensor (a cast or transposed weight, a
product of two parameters) back to the parameters through the operation that produced the tensor
(its derivation). In half precision, this would round the sum over all records before the noise is
added: a single record out of 4,000 changed such a sum by 16 clip norms. The derivation is therefore
repeated in float32, where casts to half precision have no effect, and gradients are propagated back
through the repeated derivation. A derivation depends on parameters and constants alone, so its
derivative is the same linear map for every record, both for norms and for sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function, name_of, tensors_in, writes_in_place
from ownerwise.gradients.precision import accumulation_dtype, autocasts, full_precision
from ownerwise.gradients.problems import Refused
from ownerwise.torch_internals import pytree

__all__ = ["is_half", "repeated_wide", "runs_in_half"]

_CASTS = ("half", "bfloat16")
_HALF = (torch.float16, torch.bfloat16)
# Half precision has 8 to 11 bits. A larger difference means that the repeated call computed
# something else, for example because it draws random numbers.
_TOLERANCE = 0.1


def is_half(tensor: Tensor) -> bool:
    """Return whether a tensor has a floating-point type less precise than float32."""
    return tensor.is_floating_point() and accumulation_dtype(tensor.dtype) != tensor.dtype


def runs_in_half(tensors: list[Tensor]) -> bool:
    """Return whether a call on these tensors may compute in half precision."""
    return any(map(is_half, tensors)) or (bool(tensors) and autocasts(tensors[0].device))


def repeated_wide(
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    wide: Mapping[int, Tensor],
) -> list[Tensor]:
    """Return the output tensors of a derivation, computed in float32 or better.

    Args:
        func, args, kwargs: the call.
        output: what the call returned.
        wide: the tensors that replace parametric arguments, keyed by the id of the argument.

    Raises:
        Refused: if the repeated call does not return the same tensors up to rounding.
    """
    inputs = tensors_in((args, kwargs))
    where = f"{name_of(func)} in half precision"
    remedy = "compute it in float32 and cast the result, or cast the data instead"
    if writes_in_place(func):
        raise Refused(where, "a tensor computed from parameters is changed in place", remedy)
    dtypes = {wide[id(t)].dtype for t in inputs if id(t) in wide}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            replaced = wide.get(id(leaf), leaf)
            return replaced.to(dtype) if is_half(replaced) else replaced
        return dtype if leaf in _HALF else leaf

    if name_of(func) in _CASTS:
        return [wide[id(inputs[0])]]
    args, kwargs = pytree.tree_map(widened, (args, kwargs))
    expected = tensors_in(output)
    try:
        with full_precision(inputs[0].device):
            repeated = tensors_in(func(*args, **kwargs))
    except (RuntimeError, TypeError) as error:
        raise Refused(where, f"it cannot be repeated in float32 ({error})", remedy) from error
    if len(repeated) != len(expected) or not all(map(_agree, repeated, expected)):
        raise Refused(where, "it gives a different result when repeated in float32", remedy)
    return repeated


def _agree(repeated: Tensor, expected: Tensor) -> bool:
    if repeated.shape != expected.shape or is_half(repeated):
        return False
    if not expected.is_floating_point():
        return True
    with torch.no_grad():
        apart = float((repeated.float() - expected.float()).norm())
        return not apart > _TOLERANCE * float(expected.float().norm())  # true for NaN
