"""Chains of vector layers, for networks in which call overhead exceeds the cost of arithmetic.

A tabular network is a chain of `Linear` layers and activations on one vector per record. The tape
could handle such a network, but in a network this small, tracing the calls takes longer than the
calls themselves. This module runs the chain forward and backward layer by layer, with as few calls
as possible; only the loss is left to autograd. If record i has input a_i and output gradient d_i at
a layer, its gradients are d_i a_i' (weight) and d_i (bias), so their squared norm is
|d_i|^2 (|a_i|^2 + 1).

A model qualifies only if the type of each module is exactly one of the known types, without hooks,
shared weights or a replaced `forward`. Every other model uses the tape.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ownerwise.gradients.backward import send_back
from ownerwise.gradients.contributions import sum_of_outer_products, sums_in_float64
from ownerwise.gradients.contributions.blocks import weighted_sum_of_rows
from ownerwise.gradients.contributions.grams import HIDDEN_ROUNDINGS, gram, squares_from_grams
from ownerwise.gradients.contributions.outer import GRAM
from ownerwise.gradients.precision import (
    HUGE,
    autocasts,
    full_precision,
    masked,
    row_norms,
    without_huge,
)
from ownerwise.gradients.segments import Bucket, Segments
from ownerwise.torch_internals import aten, has_any_global_hook

__all__ = ["Chain", "ChainGradients"]

# each function, and how to compute its input gradient from its output gradient and output value
_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    nn.ReLU: (torch.relu, lambda gradient, output: _relu_backward(gradient, output, 0)),
    nn.Tanh: (torch.tanh, aten.tanh_backward.default),
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default),
}
_relu_backward = aten.threshold_backward.default

_MOST_LAYERS = 300  # whose squared norms, each at most HUGE^4, do not overflow float32
_MOST_HELD = 1 << 22  # numbers in the gradients of segments that are formed at once

# a layer's weight, bias, output gradient and input
LayerUse = tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]
# a layer's weight and bias if they are trained, and the gradients of segments: the rows of the
# weight, each followed by the entry of the bias, `[count, rows * columns]`
Held = tuple[nn.Parameter | None, nn.Parameter | None, Tensor]


class Chain:
    """One forward and backward pass through a chain; create it with `of`."""

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], parameters: list[nn.Parameter]
    ) -> None:
        self._model = model
        self._layers = layers
        self._parameters = parameters
        self._kept: list[Tensor] = []  # inputs of Linear layers, outputs of activations
        self._outputs: Tensor | None = None

    @staticmethod
    def of(model: nn.Module, inputs: object) -> Chain | None:
        """Return `model` as a chain for these inputs, or None if it is not a chain."""
        if type(inputs) is not Tensor or inputs.dim() < 2 or inputs.requires_grad:
            return None
        if inputs.dtype not in (torch.float32, torch.float64):
            return None
        if has_any_global_hook() or autocasts(inputs.device):
            return None
        layers: list[nn.Module] = []
        if not _unroll(model, layers):
            return None
        if inputs.dim() > 2 and not (layers and type(layers[0]) is nn.Flatten):
            return None
        layers = [layer for layer in layers if type(layer) is not nn.Flatten]  # all are vectors now
        parameters = [p for layer in layers for p in layer._parameters.values() if p is not None]
        dtype, device = inputs.dtype, inputs.device
        for parameter in parameters:
            plain = type(parameter) is nn.Parameter
            if not plain or parameter.dtype != dtype or parameter.device != device:
                return None
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable or len(set(map(id, parameters))) < len(parameters):
            return None
        return Chain(model, layers, trainable)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs as a leaf tensor that receives the gradient of the loss."""
        values, kept = inputs.flatten(1), []
        with torch.no_grad():
            for layer in self._layers:
                if type(layer) is nn.Linear:
                    kept.append(values)
                    values = nn.functional.linear(values, layer.weight, layer.bias)
                else:
                    values = _ACTIVATIONS[type(layer)][0](values)
                    kept.append(values)
        if torch.is_grad_enabled():
            self._kept = kept
            self._outputs = values = values.detach().requires_grad_()
        return values

    def backward(
        self,
        losses: Tensor,
        segments: Segments | None = None,
        *,
        also: tuple[Tensor, Tensor] | None = None,
    ) -> ChainGradients:
        """Run the backward pass from the losses `[B]`; see `Tape.backward`.

        Args:
            losses: one loss per record.
            segments: rows that form one element each.
            also: see `send_back`.
        """
        outputs = self._outputs
        if outputs is None:
            raise RuntimeError("run the chain's forward pass first, with gradients enabled")
        if losses.shape != outputs.shape[:1]:
            raise ValueError(f"losses must have shape [{len(outputs)}]; got {list(losses.shape)}")
        outputs.grad = None
        if losses.requires_grad:
            weights = torch.ones_like(losses) if segments is None else segments.shares.to(losses)
            send_back(self._model, losses, weights, self._parameters, keep=False, also=also)
        gradient = torch.zeros_like(outputs) if outputs.grad is None else outputs.grad
        uses: list[LayerUse] = []
        first = next(i for i, layer in enumerate(self._layers) if _trains_any(layer))
        with torch.no_grad():
            for number in range(len(self._layers) - 1, first - 1, -1):
                layer, kept = self._layers[number], self._kept[number]
                if isinstance(layer, nn.Linear):
                    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
                    assert weight is not None
                    uses.append((weight, bias, gradient, kept))
                    if number > first:
                        gradient = gradient.mm(weight)
                else:
                    gradient = _ACTIVATIONS[type(layer)][1](gradient, kept)
            self._kept, self._outputs = [], None
            with full_precision(gradient.device):
                return ChainGradients(self._parameters, uses, segments)


class ChainGradients:
    """The per-record gradients of a chain, with the members of `PerRecordGradients`."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        uses: list[LayerUse],
        segments: Segments | None = None,
    ) -> None:
        self._parameters = parameters
        self._uses = uses
        self._segments = segments
        self._held: list[Held] = []  # the gradients of segments, if formed
        norms, self.finite = self._norms_of_rows() if segments is None else self._norms_of(segments)
        if not self.finite:
            bad = ~torch.isfinite(norms)
            self._held = [(w, b, masked(held, bad)) for w, b, held in self._held]
            bad = bad if segments is None else segments.expand(bad)
            self._uses = [(w, b, masked(g, bad), masked(a, bad)) for w, b, g, a in uses]
        self.norms = norms

    def _norms_of_rows(self) -> tuple[Tensor, bool]:
        """Return the norms of rows, and whether all of them are finite."""
        uses = self._uses
        # |g_i|^2 is the sum over the layers of |d_i|^2 (|a_i|^2 + 1). `squares` is |d_i|^2, and
        # `sizes` is |a_i|^2, or 0 if the weight is frozen. The 1 stands for the bias.
        gradients = [row_norms(gradient) for _, _, gradient, _ in uses]
        lengths = torch.stack(gradients + [row_norms(inputs) for _, _, _, inputs in uses])
        squares, sizes = lengths.square().split(len(uses))
        weights = [weight.requires_grad for weight, _, _, _ in uses]
        biases = [_trains(bias) for _, bias, _, _ in uses]
        if all(weights) and all(biases):
            terms = torch.addcmul(squares, squares, sizes)
        else:
            sizes[[not trains for trains in weights]] = 0
            terms = squares * (sizes + sizes.new_tensor(biases)[:, None])
        norms = terms.sum(dim=0).sqrt_()
        # one comparison in the common case: without huge or nan factors, no square overflows
        if len(uses) <= _MOST_LAYERS and lengths.numel() and float(lengths.max()) <= HUGE:
            return norms, True
        norms = without_huge(norms, lengths)
        return norms, _all_finite(norms)

    def _norms_of(self, segments: Segments) -> tuple[Tensor, bool]:
        """Return the norms of segments, and whether all of them are finite.

        The gradients are kept if they are small enough.
        """
        numbers = sum(parameter.numel() for parameter in self._parameters)
        widths = sum(gradient.shape[1] + inputs.shape[1] for _, _, gradient, inputs in self._uses)
        buckets = segments.buckets
        if len(buckets) == 1 and numbers * len(segments) <= max(_MOST_HELD, widths * segments.rows):
            norms = self._form(buckets[0])
            return norms, _all_finite(norms)
        squares = self._uses[0][2].new_zeros(len(segments), dtype=torch.float64)  # as the sums
        ones = squares.new_ones(segments.rows, 1)
        for weight, bias, gradient, inputs in self._uses:
            columns = [inputs] * weight.requires_grad + [ones.to(inputs)] * _trains(bias)
            if not columns:
                continue
            columns = torch.cat(columns, dim=1)
            for bucket in buckets:
                for part in bucket.parts(_at_once(bucket.shape[1], gradient, columns)):
                    left, right = part.padded(gradient).double(), part.repeated(columns).double()
                    squares[part.members] += _squares_of(left, right)
        norms = squares.sqrt_().to(self._uses[0][2].dtype)
        return norms, _all_finite(norms)

    def row_lengths(self) -> Tensor:
        """Return an upper bound on the norm of each row's gradient, `[rows]`."""
        return sum(
            (row_norms(g) * (row_norms(a).square() + 1).sqrt() for _, _, g, a in self._uses),
            start=self._uses[0][2].new_zeros(len(self._uses[0][2])),
        )

    def _form(self, bucket: Bucket) -> Tensor:
        """Form the gradients of segments, and return their norms."""
        ones = self._uses[0][2].new_ones(len(self._uses[0][2]), 1)  # the input of a bias
        trained = [use for use in reversed(self._uses) if _trains(use[0]) or _trains(use[1])]
        lefts = [gradient for _, _, gradient, _ in trained]
        rights = [[a] * _trains(w) + [ones] * _trains(b) for w, b, _, a in trained]
        # a single copy for all layers, from which each product takes its columns
        left = bucket.padded(torch.cat(lefts, dim=1))
        right = bucket.repeated(torch.cat([part for parts in rights for part in parts], dim=1))
        widths = [sum(part.shape[1] for part in parts) for parts in rights]
        for (weight, bias, _, _), d, a in zip(
            trained,
            left.split([gradient.shape[1] for gradient in lefts], dim=2),
            right.split(widths, dim=2),
            strict=True,
        ):
            held = torch.bmm(d.mT, a).flatten(1)
            self._held.append(
                (weight if _trains(weight) else None, bias if _trains(bias) else None, held)
            )
        return row_norms(torch.stack([row_norms(held) for _, _, held in self._held], dim=1))

    def __len__(self) -> int:
        return len(self.norms)

    def weighted_sum(
        self, factors: Tensor, *, in_blocks: bool = True
    ) -> dict[nn.Parameter, Tensor]:
        """See `PerRecordGradients.weighted_sum`."""
        with full_precision(self.norms.device):
            return self._weighted_sum(factors.detach().to(self.norms.dtype), in_blocks)

    def _weighted_sum(self, factors: Tensor, in_blocks: bool) -> dict[nn.Parameter, Tensor]:
        if self._held:
            return self._sum_of_held(factors, in_blocks)
        if self._segments is not None:
            factors = self._segments.expand(factors).double()  # rows may cancel each other
        column = factors[:, None]
        sums: dict[nn.Parameter, Tensor] = {}
        for weight, bias, gradient, inputs in reversed(self._uses):
            scaled = gradient * column
            if self._segments is not None:
                inputs = inputs.double()
            elif in_blocks and sums_in_float64(gradient, inputs):
                scaled = scaled.double()  # once, for the weight and the bias
            if weight.requires_grad:
                total = sum_of_outer_products(scaled, inputs) if in_blocks else scaled.mT @ inputs
                sums[weight] = total
            if bias is not None and bias.requires_grad:
                sums[bias] = scaled.sum(dim=0, dtype=torch.float64 if in_blocks else None)
        return sums

    def _sum_of_held(self, factors: Tensor, in_blocks: bool) -> dict[nn.Parameter, Tensor]:
        sums: dict[nn.Parameter, Tensor] = {}
        for weight, bias, held in self._held:
            total = weighted_sum_of_rows(factors, held) if in_blocks else factors @ held
            if weight is None:
                assert bias is not None
                sums[bias] = total
                continue
            total = total.view(len(weight), -1)
            sums[weight] = total[:, : weight.shape[1]]
            if bias is not None:
                sums[bias] = total[:, -1]
        return sums

    def per_record(self, start: int = 0, stop: int | None = None) -> dict[nn.Parameter, Tensor]:
        """Return the gradients themselves, `{parameter: [records, *shape]}`, for research."""
        if self._segments is not None:
            raise NotImplementedError("the gradients of segments are not formed")
        rows = slice(start, len(self) if stop is None else stop)
        formed: dict[nn.Parameter, Tensor] = {}
        for weight, bias, gradient, inputs in reversed(self._uses):
            formed[weight] = gradient[rows, :, None] * inputs[rows, None, :]
            if bias is not None:
                formed[bias] = gradient[rows]
        return {parameter: formed[parameter] for parameter in self._parameters}


def _unroll(model: nn.Module, layers: list[nn.Module]) -> bool:
    """Append the layers of nested `Sequential`s in order; return whether they form a chain."""
    kind, state = type(model), model.__dict__
    if "forward" in state or state["_forward_hooks"] or state["_forward_pre_hooks"]:
        return False
    if state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    if kind is nn.Linear or kind in _ACTIVATIONS:
        layers.append(model)
        return True
    if kind is nn.Flatten:
        layers.append(model)
        return (state["start_dim"], state["end_dim"]) == (1, -1)
    if kind is not nn.Sequential:
        return False
    return all(_unroll(module, layers) for module in state["_modules"].values())


def _gram_is_cheaper(terms: int, rows: int, columns: int) -> bool:
    """Return whether Gram matrices of this many terms cost less than forming their product."""
    return GRAM * terms * (rows + columns) <= rows * columns


def _at_once(terms: int, left: Tensor, right: Tensor) -> int:
    """Return of how many segments the norms are computed at once, so that memory suffices."""
    rows, columns = left.shape[1], right.shape[1]
    each = terms * terms if _gram_is_cheaper(terms, rows, columns) else rows * columns
    return max(1, _MOST_HELD // max(each, terms * (rows + columns)))


def _squares_of(left: Tensor, right: Tensor) -> Tensor:
    """Return squared norms of sums of outer products, `[segments]`, from their float64 factors.

    They are sums over pairs of terms s, t of <left_s, left_t> <right_s, right_t>, or over the
    entries of the sums. Rounding errors are added to the norms, so that no norm is too small.
    """
    if _gram_is_cheaper(left.shape[1], left.shape[2], right.shape[2]):
        entries = left.shape[2] + right.shape[2]
        return squares_from_grams(gram(left), gram(right), entries, lambda i: left[i].mT @ right[i])
    most = (left.norm(dim=2) * right.norm(dim=2)).sum(dim=1)
    roundings = max(HIDDEN_ROUNDINGS, left.shape[1]) * torch.finfo(left.dtype).eps
    return (torch.bmm(left.mT, right).flatten(1).norm(dim=1) + roundings * most).square()


def _all_finite(norms: Tensor) -> bool:
    return math.isfinite(float(norms.sum()))  # a single call


def _trains_any(layer: nn.Module) -> bool:
    return any(_trains(parameter) for parameter in layer._parameters.values())


def _trains(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad
