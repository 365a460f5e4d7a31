"""Matrix products on the CPU, by the faster of torch's two libraries.

Torch's own products run in MKL, which uses the 512-bit instructions of Intel's processors only. On
other processors that have them, oneDNN takes half the time for large products (docs/benchmarks.md).
Everywhere else, and for small products, float64 or half precision, these functions call torch's own
products. Both libraries compute in float32, and the choice depends on the processor, the types and
the shapes alone, so equal calls give equal results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.precision import autocasts

__all__ = ["Linear", "affine", "product", "tanh"]

# Below this many multiply-adds, preparing a call to oneDNN takes longer than it saves, and below
# the second, an additional autograd function does.
_SMALL, _SMALL_LAYER = 1 << 20, 1 << 22
_TANH = 64  # multiply-adds that take as long as one hyperbolic tangent
_PART = 1 << 17  # the numbers of a part that stays in cache


@functools.cache
def _onednn() -> Any:
    """Return oneDNN's `x @ weight.T + bias`, or None where torch's own products are as fast."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None
    processor = torch.cpu.get_capabilities()
    if not processor.get("avx512_f") or "Intel" in processor.get("cpu_name", "Intel"):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _faster(multiply_adds: int, *factors: Tensor | None) -> bool:
    """Return whether oneDNN can compute a product of this size, and faster than torch itself."""
    if multiply_adds < _SMALL or _onednn() is None:
        return False
    given = [factor for factor in factors if factor is not None]
    graph = torch.is_grad_enabled() and any(factor.requires_grad for factor in given)
    return not graph and all(f.dtype == torch.float32 and f.device.type == "cpu" for f in given)


def product(left: Tensor, right: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return `left @ right`, and `plus` added to it if given, for matrices."""
    if _faster(left.numel() * right.shape[1], left, right, plus):
        call = _onednn()
        # The first factor is read row by row, and is copied unless it is contiguous. The second may
        # be transposed, but other gaps make it slow.
        if _dense(right) and (left.is_contiguous() or right.numel() >= left.numel()):
            if plus is not None:
                return call.binary(left, plus, right.t(), None, "add")
            return call(left, right.t(), None, "none", [], "")
        if _dense(left) and plus is None:
            return call(right.t(), left, None, "none", [], "").t()
    return torch.mm(left, right) if plus is None else torch.addmm(plus, left, right)


def _dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def affine(input: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none") -> Tensor:
    """Return `input @ weight.T + bias`, followed by "sigmoid", "tanh" or "none"."""
    if _faster(input.numel() * len(weight), input, weight, bias):
        return _onednn()(input, weight, bias, then, [], "")
    output = functional.linear(input, weight, bias)
    if then == "none":
        return output
    return tanh(output) if then == "tanh" else output.sigmoid_()


def tanh(input: Tensor) -> Tensor:
    """Return the hyperbolic tangent, for which MKL is slow on the same processors."""
    if not (_faster(_TANH * input.numel(), input) and input.is_contiguous()):
        return torch.tanh(input)
    output = torch.empty_like(input)
    parts = zip(input.view(-1).split(_PART), output.view(-1).split(_PART), strict=True)
    for part, into in parts:
        into.copy_(part.to_mkldnn().tanh_().to_dense())
    return output


class Linear(torch.autograd.Function):
    """A linear layer on vectors `[rows, columns]` with a constant weight and bias.

    Only its input has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `input @ weight.T + bias`."""
        ctx.save_for_backward(weight)
        return affine(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the input."""
        (weight,) = ctx.saved_tensors
        return product(gradients[0], weight), None, None

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the layer as torch does, or faster."""
        size = input.numel() * len(weight)
        with torch.no_grad():
            faster = size >= _SMALL_LAYER and _faster(size, input, weight, bias)
        if not faster or autocasts(input.device):
            return functional.linear(input, weight, bias)
        rows: Any = cls.apply(input.reshape(-1, input.shape[-1]), weight, bias)
        return rows if input.dim() == 2 else rows.view(*input.shape[:-1], -1)
