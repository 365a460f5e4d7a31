"""The time loop of an LSTM, with an explicit forward and backward pass.

Torch's own call hides the gradients of the gates, from which per-record gradients are computed.
This loop computes the same values and returns those gradients. Pointwise operations run step by
step on blocks that stay in cache. With autograd, a private step would take up to 20% longer. The
gates i, f and o are one product, followed by a sigmoid, and g is another, followed by tanh.

The shapes for `T` time steps, `B` records, `I` inputs and `H` hidden units are `inputs
[T, B, I]`, `recurrent [T, B, 4*H]`, `w_ih [4*H, I]` and `w_hh [4*H, H]`. `recurrent`
contains zeros that represent the recurrent part of the gates and receive its gradient. `order`
lists the time steps in the order of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ownerwise.gradients.products import affine, product, tanh
from ownerwise.gradients.taps import Delivery
from ownerwise.gradients.workspace import Loan
from ownerwise.torch_internals import aten

__all__ = ["LSTM"]

_sigmoid_back = aten.sigmoid_backward.grad_input
_tanh_back = aten.tanh_backward.grad_input


class LSTM(torch.autograd.Function):
    """One direction of a layer, with gates i, f, g, o; `bias` is the sum of both biases."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        recurrent: Tensor,
        first: Tensor,
        first_cell: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        bias: Tensor | None,
        order: Sequence[int],
        joined: Tensor,
        loan: Loan,
        delivery: Delivery,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states `[T, B, H]` and the last cell state `[B, H]`.

        Write each time step's input and previous hidden state to `joined`, `[T, B, I + H]`.
        """
        columns, size = w_ih.shape[1], w_hh.shape[1]
        joined[..., :columns].copy_(inputs)
        before = joined[..., columns:]
        before[order[0]].copy_(first)
        states = joined.new_empty(*joined.shape[:2], size)
        cells = torch.empty_like(states)
        weights = _apart(torch.cat([w_ih, w_hh], dim=1))
        biases = (None, None) if bias is None else _apart(bias)
        gates, squashed, cell = [], [], first_cell
        for at, t in enumerate(order):
            ifo = affine(joined[t], weights[0], biases[0], "sigmoid")
            g = affine(joined[t], weights[1], biases[1], "tanh")
            i, f, o = ifo.chunk(3, dim=1)
            cell = torch.mul(f, cell, out=cells[t]).addcmul_(i, g)
            squashed.append(tanh(cell))
            state = torch.mul(squashed[at], o, out=states[t])
            if at + 1 < len(order):
                before[order[at + 1]].copy_(state)
            gates += [ifo, g]
        # `first` is saved so that autograd refuses it if it is changed in place before then
        ctx.save_for_backward(cells, first_cell, w_ih, w_hh, first, *squashed, *gates)
        ctx.order, ctx.loan, ctx.delivery = order, loan, delivery
        return states, cell.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, the gates, and the first hidden and cell states.

        In the last backward pass, the gates' gradient is in the block of `loan`.
        """
        d_states, d_last = gradients
        cells, first_cell, w_ih, w_hh, _, *rest = ctx.saved_tensors
        order, block = ctx.order, ctx.loan.block
        squashed, gates = rest[: len(order)], rest[len(order) :]
        d_gates = block if ctx.delivery.last else torch.empty_like(block)
        d_state, d_cell = d_states[order[-1]], d_last.clone()
        part, other = torch.empty_like(d_cell), torch.empty_like(d_cell)
        for at in range(len(order) - 1, -1, -1):
            t = order[at]
            i, f, o = gates[2 * at].chunk(3, dim=1)
            g = gates[2 * at + 1]
            d_i, d_f, d_g, d_o = d_gates[t].chunk(4, dim=1)
            before = cells[order[at - 1]] if at else first_cell
            torch.mul(d_state, o, out=part)
            d_cell += _tanh_back(part, squashed[at], grad_input=other)
            _sigmoid_back(torch.mul(d_state, squashed[at], out=part), o, grad_input=d_o)
            _sigmoid_back(torch.mul(d_cell, g, out=part), i, grad_input=d_i)
            _tanh_back(torch.mul(d_cell, i, out=part), g, grad_input=d_g)
            _sigmoid_back(torch.mul(d_cell, before, out=part), f, grad_input=d_f)
            d_cell.mul_(f)
            d_state = product(d_gates[t], w_hh, d_states[order[at - 1]] if at else None)
        d_inputs = None
        if ctx.needs_input_grad[0]:
            d_inputs = product(d_gates.flatten(0, 1), w_ih).view(*d_gates.shape[:2], -1)
        return d_inputs, d_gates, d_state, d_cell, *[None] * 7


def _apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the gates i, f and o, and those of gate g."""
    i, f, g, o = rows.chunk(4)
    return torch.cat([i, f, o]), g
