"""Affine normalisations within a record: layer, group, instance and RMS norm.

``y = z * weight + bias`` with ``z`` the normalised input, so a record's gradients are
``sum_t g_t z_t`` and ``sum_t g_t``. ``z`` is not stored: the call is repeated without its
parameters. Batch norm is a rule only with fixed statistics; else it mixes records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import Contribution, Dense, Saved, accumulation_dtype
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.sources import Source, name_of

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["NORMALISATIONS", "normalisation"]

BY_CHANNEL = (functional.group_norm, functional.instance_norm, functional.batch_norm)
NORMALISATIONS = (*BY_CHANNEL, functional.layer_norm, functional.rms_norm)
STATISTICS = ("running_mean", "running_var")


def normalisation(tape: Tape, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rule of ``layer_norm``, ``group_norm``, ``instance_norm``, ``rms_norm``, ``batch_norm``."""
    call = _signature(func).bind(*args, **kwargs)
    given = call.arguments
    sources = {name: tape.source(given.get(name)) for name in ("weight", "bias")}
    used = [source for source in sources.values() if source is not None]
    where = f"{name_of(func)}({used[0].name if used else '?'})"
    _refuse_statistics(func, given, where)
    inputs = given["input"]
    if tape.source(inputs) is not None or not used or inputs.dim() < 2:
        return NotImplemented
    given |= {name: tape.value(given.get(name)) for name in sources if name in given}
    output = func(*call.args, **call.kwargs)
    given |= {name: None for name in sources if name in given}  # from here on: without parameters
    statistics = [name for name in STATISTICS if given.get(name) is not None]
    saved = {name: Saved(given[name], where) for name in ("input", *statistics)}
    leading = 1 if func in BY_CHANNEL else inputs.dim() - len(given["normalized_shape"])

    def total(product: Tensor, layout: Layout, count: int, shape: torch.Size) -> Dense:
        parts = layout.records(product, count)
        if func in BY_CHANNEL:
            parts = parts.reshape(count, -1, shape[0], math.prod(product.shape[2:]))
            return Dense(parts.sum(dim=(1, 3)))
        return Dense(parts.reshape(count, -1, *shape).sum(dim=1))

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        gradient = gradient.to(accumulation_dtype(gradient.dtype))
        if (source := sources["bias"]) is not None:
            yield source, total(gradient, layout, count, source.value.shape)
        if (source := sources["weight"]) is not None:
            for name, tensor in saved.items():
                given[name] = tensor.get().to(gradient.dtype)
            product = func(*call.args, **call.kwargs).mul_(gradient)
            yield source, total(product, layout, count, source.value.shape)

    return tape.tap(func, output, used, range(leading), build)


def _refuse_statistics(func: Callable[..., Any], given: dict[str, Any], where: str) -> None:
    """Statistics over the batch mix the records; running ones would leave un-noised."""
    if func is functional.batch_norm and given.get("training"):
        raise Refused(
            where,
            "batch statistics mix the records",
            "use LayerNorm (GroupNorm on images), or put the layer in eval mode with statistics "
            "of public data",
        )
    kept = func is functional.instance_norm and given.get("running_mean") is not None
    if kept and given.get("use_input_stats", True):
        raise Refused(
            where,
            "running statistics of the batch are kept in buffers, un-noised",
            "build it with track_running_stats=False",
        )


_signature = cache(inspect.signature)
