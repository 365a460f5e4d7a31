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
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional

from ownerwise.gradients.precision import autocasts
from ownerwise.torch_internals import aten, in_transform, onednn_linear

__all__ = ["Linear", "Tanh", "affine", "product", "products", "tanh"]

# Below these many multiply-adds, preparing a call to oneDNN takes longer than it saves: for one
# product, for each product of a batch, and for one in an autograd function of its own.
_SMALL, _SMALL_OF_MANY, _SMALL_LAYER = 1 << 20, 1 << 21, 1 << 22
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
    return onednn_linear


def _faster(multiply_adds: int, *factors: Tensor | None) -> bool:
    """Return whether oneDNN can compute a product of this size, and faster than torch itself."""
    if multiply_adds < _SMALL or _onednn() is None:
        return False
    given = [factor for factor in factors if factor is not None]
    if torch.is_grad_enabled() and any(factor.requires_grad for factor in given):
        return False  # oneDNN's product has no derivative
    if in_transform() or any(unpack_dual(factor).tangent is not None for factor in given):
        return False  # autograd functions work neither in torch.func nor in forward mode
    return all(
        f.dtype == torch.float32 and f.device.type == "cpu" and f.layout == torch.strided
        for f in given
    )


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


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `left[i] @ right[i]` for each i, for `[count, ...]` matrices; written to `out`."""
    size = left[0].numel() * right.shape[2] if len(left) else 0
    if size < _SMALL_OF_MANY or not _faster(size, left, right):
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    left = left.contiguous()  # at once, because oneDNN would do it one by one
    if not _dense(right[0]):
        right = right.contiguous()
    out = left.new_empty(*left.shape[:2], right.shape[2]) if out is None else out
    call = _onednn()
    for first, second, into in zip(left, right.mT, out, strict=True):
        into.copy_(call(first, second, None, "none", [], ""))
    return out


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
    if not _faster(_TANH * input.numel(), input):
        return torch.tanh(input)
    output = torch.empty_like(input)  # in the same memory format
    given, into = input, output
    if not input.is_contiguous():
        given, into = input.movedim(1, -1), output.movedim(1, -1)
        if not given.is_contiguous():
            return torch.tanh(input)
    for part, end in zip(given.view(-1).split(_PART), into.view(-1).split(_PART), strict=True):
        end.copy_(part.to_mkldnn().tanh_().to_dense())
    return output


class Tanh(torch.autograd.Function):
    """The hyperbolic tangent."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Return tanh(input)."""
        output = tanh(input)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the input."""
        (output,) = ctx.saved_tensors
        return aten.tanh_backward(gradients[0], output)

    @classmethod
    def of(cls, input: Tensor) -> Tensor:
        """Return tanh(input), computed as torch does, or faster."""
        with torch.no_grad():
            faster = _faster(_TANH * input.numel(), input)
        return cls.apply(input) if faster else torch.tanh(input)  # type: ignore[return-value]


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
        constant = not (weight.requires_grad or (bias is not None and bias.requires_grad))
        with torch.no_grad():
            faster = size >= _SMALL_LAYER and weight.dim() == 2
            faster = faster and constant and _faster(size, input, weight, bias)
        if not faster or autocasts(input.device):
            return functional.linear(input, weight, bias)
        rows: Any = cls.apply(input.reshape(-1, input.shape[-1]), weight, bias)
        return rows if input.dim() == 2 else rows.view(*input.shape[:-1], -1)
