"""The rule for normalisations within a record: layer, group, instance and RMS norm.

The output is `y = z * weight + bias`, where `z` is the normalised input, so a record's
gradients are `sum_t g_t z_t` and `sum_t g_t`. `z` is not stored: the call is repeated without
its parameters. Batch norm is covered only with fixed statistics; otherwise it mixes records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function, name_of
from ownerwise.gradients.contributions import Dense
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.problems import BATCH_STATISTICS, RUNNING_STATISTICS, Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use

__all__ = ["batch_norm", "normalisation"]

BY_CHANNEL = (functional.group_norm, functional.instance_norm, functional.batch_norm)
STATISTICS = ("running_mean", "running_var")

_signature = cache(inspect.signature)


def batch_norm(context: Context, func: Function, *args: Any, **kwargs: Any) -> Any:
    """Handle batch_norm in eval mode; reject it in training mode, even without parameters."""
    given = _signature(func).bind(*args, **kwargs).arguments
    if given.get("training"):
        tracked = context.tracked(given.get("weight"))
        raise Refused(
            "batch_norm" if tracked is None else f"batch_norm({tracked.name})",
            BATCH_STATISTICS,
            "use LayerNorm (GroupNorm on images), or put the layer in eval mode with statistics "
            "from public data",
        )
    if not torch.is_grad_enabled():
        return NotImplemented
    return normalisation(context, func, *args, **kwargs)


def normalisation(context: Context, func: Function, *args: Any, **kwargs: Any) -> Any:
    """Handle layer_norm, group_norm, instance_norm, rms_norm, and batch_norm in eval mode."""
    call = _signature(func).bind(*args, **kwargs)
    given = call.arguments
    affine = {name: context.tracked(given.get(name)) for name in ("weight", "bias")}
    used = [tracked for tracked in affine.values() if tracked is not None]
    where = f"{name_of(func)}({used[0].name if used else '?'})"
    kept = func is functional.instance_norm and given.get("running_mean") is not None
    if kept and given.get("use_input_stats", True):
        raise Refused(where, *RUNNING_STATISTICS)
    inputs = given["input"]
    if context.tracked(inputs) is not None or not used or inputs.dim() < 2:
        return NotImplemented
    given |= {name: context.value(given.get(name)) for name in affine if name in given}
    output = func(*call.args, **call.kwargs)
    given |= {name: None for name in affine if name in given}  # repeated without parameters
    statistics = [name for name in STATISTICS if given.get(name) is not None]
    saved = {name: Saved(given[name], where) for name in ("input", *statistics)}
    leading = 1 if func in BY_CHANNEL else inputs.dim() - len(given["normalized_shape"])

    def total(product: Tensor, layout: Layout, count: int, shape: torch.Size) -> Dense:
        parts = layout.records(product, count)
        if func in BY_CHANNEL:
            parts = parts.reshape(count, -1, shape[0], math.prod(product.shape[2:]))
            return Dense(parts.sum(dim=(1, 3)))
        return Dense(parts.reshape(count, -1, *shape).sum(dim=1))

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        gradient = gradient.to(accumulation_dtype(gradient.dtype))
        if (tracked := affine["bias"]) is not None:
            yield tracked, total(gradient, layout, count, tracked.tensor.shape)
        if (tracked := affine["weight"]) is not None:
            for name, tensor in saved.items():
                given[name] = tensor.get().to(gradient.dtype)
            product = func(*call.args, **call.kwargs).mul_(gradient)
            yield tracked, total(product, layout, count, tracked.tensor.shape)

    return context.tap(func, output, used, range(leading), build)
