"""Affine normalisations within a record: layer, group, instance and RMS norm.

``y = z * weight + bias`` with ``z`` the normalised input, so a record's gradients are
``sum_t g_t z_t`` and ``sum_t g_t``. ``z`` is not stored: it comes back from the input and the saved
mean and scale. Batch norm is a rule only with fixed statistics; else it mixes records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import Contribution, Dense, Saved, accumulation_dtype
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.sources import Source

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


def _affine(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    output: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: Sequence[int],
    normalised: Callable[[Tensor], Tensor],
) -> Tensor:
    """Tap ``output = normalised(input) * weight + bias``; the parameters have the shape of the
    dimensions that follow the records' ones (layer norm) or of dimension 1 (``dims == (0,)``).
    """
    weight_source: Source | None = tape.source(weight)
    bias_source: Source | None = tape.source(bias)
    sources = [(s, None) for s in (weight_source, bias_source) if s is not None]
    saved = Saved(input, f"normalisation({sources[0][0].name})")
    by_channel = func in (functional.group_norm, functional.instance_norm, functional.batch_norm)

    def total(product: Tensor, layout: Layout, count: int, shape: torch.Size) -> Dense:
        parts = layout.records(product, count)
        if by_channel:
            parts = parts.reshape(count, -1, shape[0], math.prod(product.shape[2:]))
            return Dense(parts.sum(dim=(1, 3)))
        return Dense(parts.reshape(count, -1, *shape).sum(dim=1))

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        dtype = accumulation_dtype(gradient.dtype)
        gradient = gradient.to(dtype)
        if bias_source is not None:
            yield bias_source, total(gradient, layout, count, bias_source.value.shape)
        if weight_source is not None:
            product = normalised(saved.get().to(dtype)).mul_(gradient)
            yield weight_source, total(product, layout, count, weight_source.value.shape)

    return tape.tap(func, output, sources, dims, build)


def layer_norm(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Rule of ``layer_norm``."""
    if tape.source(input) is not None:
        return NotImplemented
    output, mean, scale = torch.native_layer_norm(
        input, normalized_shape, tape.value(weight), tape.value(bias), eps
    )
    leading = range(input.dim() - len(normalized_shape))
    mean, scale = mean.detach(), scale.detach()

    def normalised(inputs: Tensor) -> Tensor:
        return (inputs - mean).mul_(scale)

    return _affine(tape, func, input, output, weight, bias, leading, normalised)


def group_norm(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Rule of ``group_norm``."""
    if tape.source(input) is not None or input.dim() < 2:
        return NotImplemented
    count, channels = input.shape[:2]
    space = math.prod(input.shape[2:])
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    dense = input if last else input.contiguous()  # the kernel takes no other strides
    output, mean, scale = torch.native_group_norm(
        dense, tape.value(weight), tape.value(bias), count, channels, space, num_groups, eps
    )
    mean, scale = mean.detach(), scale.detach()

    def normalised(inputs: Tensor) -> Tensor:
        shape = (inputs.shape[0], num_groups, channels // num_groups)
        spread = [m[:, :, None].expand(shape).flatten(1) for m in (mean, scale)]
        middle, factor = (m.reshape(*m.shape, *[1] * (inputs.dim() - 2)) for m in spread)
        return (inputs - middle).mul_(factor)

    return _affine(tape, func, input, output, weight, bias, (0,), normalised)


def instance_norm(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Rule of ``instance_norm``: a group norm with one group per channel."""
    source: Source | None = tape.source(weight) or tape.source(bias)
    name = source.name if source else "?"
    if use_input_stats and running_mean is not None:
        raise Refused(
            f"instance_norm({name})",
            "running statistics of the batch are kept in buffers, un-noised",
            "build it with track_running_stats=False",
        )
    if tape.source(input) is not None or input.dim() < 3:
        return NotImplemented
    if not use_input_stats:
        return _fixed(tape, func, input, running_mean, running_var, weight, bias, eps)
    output = functional.instance_norm(
        input, None, None, tape.value(weight), tape.value(bias), True, momentum, eps
    )

    def normalised(inputs: Tensor) -> Tensor:
        return functional.instance_norm(inputs, eps=eps)

    return _affine(tape, func, input, output, weight, bias, (0,), normalised)


def batch_norm(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Rule of ``batch_norm``: refused unless its statistics are fixed (eval mode)."""
    if training:
        source: Source | None = tape.source(weight) or tape.source(bias)
        raise Refused(
            f"batch_norm({source.name if source else '?'})",
            "batch statistics mix the records",
            "use LayerNorm (GroupNorm on images), or put the layer in eval mode with statistics "
            "of public data",
        )
    if tape.source(input) is not None:
        return NotImplemented
    return _fixed(tape, func, input, running_mean, running_var, weight, bias, eps)


def _fixed(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    assert running_mean is not None
    assert running_var is not None
    output = functional.batch_norm(
        input, running_mean, running_var, tape.value(weight), tape.value(bias), False, 0.0, eps
    )
    mean, variance = running_mean.clone(), running_var.clone()

    def normalised(inputs: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        scale = torch.rsqrt(variance.to(inputs.dtype) + eps)
        return (inputs - mean.to(inputs.dtype).reshape(shape)).mul_(scale.reshape(shape))

    return _affine(tape, func, input, output, weight, bias, (0,), normalised)


def rms_norm(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Rule of ``rms_norm``."""
    if tape.source(input) is not None:
        return NotImplemented
    output = functional.rms_norm(input, list(normalized_shape), tape.value(weight), eps)
    rank = len(normalized_shape)
    tiny = torch.finfo(input.dtype).eps if eps is None else eps

    def normalised(inputs: Tensor) -> Tensor:
        mean = inputs.square().mean(dim=tuple(range(-rank, 0)), keepdim=True)
        return inputs * torch.rsqrt(mean + tiny)

    return _affine(tape, func, input, output, weight, None, range(input.dim() - rank), normalised)
