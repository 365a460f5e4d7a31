"""Kernels of convolutions in one, two and three dimensions.

A record's weight gradient is `sum_t gradient[:, t] (x) patch[t]` over output positions t. Patches
are cut in channels-last format, so that their innermost dimension is contiguous, and for only a few
records at a time, so that they stay in cache. docs/benchmarks.md compares this with other ways.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions.contribution import few_rows
from ownerwise.gradients.contributions.outer import OuterProducts
from ownerwise.gradients.memory_budget import MemoryBudget
from ownerwise.gradients.workspace import Workspace
from ownerwise.torch_internals import aten

__all__ = ["Convolved", "Geometry"]


class Geometry:
    """Kernel, stride, padding on both sides, dilation and groups of a convolution."""

    def __init__(
        self, weight_shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int
    ) -> None:
        self.weight_shape = weight_shape
        self.kernel = weight_shape[2:]
        rank = len(self.kernel)
        self.stride = _each(stride, rank)
        self.dilation = _each(dilation, rank)
        self.groups = groups
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            self.before = tuple(t // 2 for t in total)
            self.after = tuple(t - t // 2 for t in total)
        else:
            self.before = self.after = _each(0 if padding == "valid" else padding, rank)

    def padded(self, last: Tensor, workspace: Workspace) -> Tensor:
        """Return `[n, *space, channels]` as a zero-padded, contiguous scratch tensor."""
        if not any(self.before) and not any(self.after):
            return last.contiguous()
        sides = list(zip(self.before, last.shape[1:-1], self.after, strict=True))
        shape = (last.shape[0], *[sum(side) for side in sides], last.shape[-1])
        block = workspace.zeros(("padded", self.before, self.after), shape, last)
        inside = tuple(slice(before, before + size) for before, size, _ in sides)
        block[(slice(None), *inside)].copy_(last)
        return block

    def patches(self, last: Tensor, out_space: tuple[int, ...], workspace: Workspace) -> Tensor:
        """Cut `[n, *space, channels]` into patches `[n, positions, kernel, channels]`."""
        last = self.padded(last, workspace)
        steps = last.stride()
        walk = [s * t for s, t in zip(self.stride, steps[1:-1], strict=True)]
        inside = [d * t for d, t in zip(self.dilation, steps[1:-1], strict=True)]
        shape = (last.shape[0], *out_space, *self.kernel, last.shape[-1])
        view = last.as_strided(shape, (steps[0], *walk, *inside, steps[-1]))
        block = workspace.scratch("patches", shape, last)
        block.copy_(view)
        return block.flatten(1, len(out_space)).flatten(2, -2)

    def weight_gradient(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the weight gradient for a channels-first batch, computed by torch's own kernel."""
        padding = self.before
        if self.before != self.after:
            sides = zip(reversed(self.before), reversed(self.after), strict=True)
            inputs = functional.pad(inputs, [size for side in sides for size in side])
            padding = (0,) * len(self.kernel)
        weight = inputs.new_empty(1).expand(self.weight_shape)
        not_transposed = (False, (0,) * len(self.kernel))
        options = (self.stride, padding, self.dilation, *not_transposed, self.groups)
        only_weight = (False, True, False)
        return aten.convolution_backward(gradient, inputs, weight, None, *options, only_weight)[1]


class Convolved(OuterProducts):
    """One use of a kernel.

    `inputs` has shape `[count * frames, channels, *space]`; `gradient` has the corresponding
    shape of the output. Each record has `frames` images.
    """

    def __init__(
        self, inputs: Tensor, gradient: Tensor, count: int, geometry: Geometry, budget: MemoryBudget
    ) -> None:
        self.count = count
        self.frames = len(inputs) // count
        self.geometry = geometry
        self.shape = geometry.weight_shape
        terms = self.frames * math.prod(gradient.shape[2:])
        sizes = (terms, self.shape[0], math.prod(self.shape[1:]))
        super().__init__(gradient, inputs, sizes, budget, groups=geometry.groups)

    def _images(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the gradients and inputs of a range of records in the accumulation type."""
        window = slice(start * self.frames, stop * self.frames)
        return self.left[window].to(self.dtype), self.right[window].to(self.dtype)

    def left_right(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `OuterProducts`; the right factor consists of patches of the inputs."""
        gradient, inputs = (images.movedim(1, -1) for images in self._images(start, stop))
        patches = self.geometry.patches(inputs, gradient.shape[1:-1], self.budget.workspace)
        count, terms, groups = stop - start, self.terms, self.groups
        if groups == 1:
            return gradient.reshape(count, terms, -1), patches.reshape(count, terms, -1)
        gradient = gradient.reshape(count, terms, groups, -1).transpose(1, 2)
        patches = patches.reshape(count, terms, -1, groups, self.shape[1]).permute(0, 3, 1, 2, 4)
        return gradient.flatten(0, 1), patches.flatten(3).flatten(0, 1)

    def shaped(self, formed: Tensor) -> Tensor:
        """See `OuterProducts`; a row of a formed gradient is `[*kernel, channels]`."""
        kernel = self.geometry.kernel
        parts = formed.unflatten(-1, (self.rows, *kernel, self.shape[1]))
        return parts.movedim(-1, -1 - len(kernel))

    def records_at_once(self, way: str) -> int:
        """See `OuterProducts`; the patches take most of the memory."""
        width = self.columns + self.rows + (2 * self.terms if way == "ghost" else 0)
        return max(4, self.budget.chunk_bytes // (4 * self.terms * width))

    def sum_of_products(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """See `OuterProducts`."""
        if self.frames > 1:
            weights = weights.repeat_interleave(self.frames)
        gradient, inputs = self._images(start, stop)
        rows = None if self.budget.even else few_rows(weights)
        if rows is not None:
            inputs, gradient, weights = inputs[rows], gradient[rows], weights[rows]
        scale = weights.reshape(-1, *[1] * (gradient.dim() - 1))
        if inputs.numel() < gradient.numel():
            return self.geometry.weight_gradient(inputs * scale, gradient)
        return self.geometry.weight_gradient(inputs, gradient * scale)

    def terms_bound(self) -> Tensor | None:
        """See `Contribution`.

        A kernel tap reads pixel p if position * stride + tap * dilation = p along each axis, for
        some position. Along an axis, the taps that read a given pixel are stride / gcd(stride,
        dilation) apart.
        """
        bound = super().terms_bound()
        if bound is None or bound is self._bound:  # Gram matrices are those of patches
            return bound
        geometry = self.geometry
        axes = zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        apart = [(kernel, stride // math.gcd(stride, step)) for kernel, stride, step in axes]
        return bound * math.sqrt(math.prod(-(-kernel // distance) for kernel, distance in apart))


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """Return one number per spatial dimension."""
    if isinstance(value, int):
        return (value,) * rank
    values = tuple(int(v) for v in value)
    return values * rank if len(values) == 1 else values
