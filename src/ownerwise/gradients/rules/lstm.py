"""The time loop of an LSTM, with an explicit forward and backward pass.

Torch's own call hides the gradients of the gates, from which per-record gradients are computed.
This loop computes the same values and returns those gradients. Pointwise operations run step by
step on blocks that stay in cache. With autograd, a private step would take up to 20% longer.

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
        loan: Loan,
        delivery: Delivery,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states `[T, B, H]` and the last cell state `[B, H]`.

        The gates are stored in the block of `loan`. In the last backward pass, the gates are
        overwritten by their gradients.
        """
        size = w_hh.shape[1]
        gates = loan.block
        flat, rows = gates.flatten(0, 1), inputs.flatten(0, 1)
        torch.mm(rows, w_ih.t(), out=flat)
        states = gates.new_empty(*gates.shape[:2], size)
        cells, squashed = torch.empty_like(states), torch.empty_like(states)
        transposed = w_hh.t()
        state, cell = first, first_cell
        for t in order:
            gate = gates[t] if bias is None else gates[t].add_(bias)  # already in cache here
            gate.addmm_(state, transposed)
            i, f, g, o = gate.chunk(4, dim=1)
            gate[:, : 2 * size].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            cell = torch.mul(f, cell, out=cells[t]).addcmul_(i, g)
            state = torch.mul(torch.tanh(cell, out=squashed[t]), o, out=states[t])
        ctx.save_for_backward(gates, cells, squashed, first_cell, w_ih, w_hh)
        ctx.order, ctx.loan, ctx.delivery = order, loan, delivery
        return states, cell.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, the gates, and the first hidden and cell states."""
        d_states, d_last = gradients
        gates, cells, squashed, first_cell, w_ih, w_hh = ctx.saved_tensors
        order = ctx.order
        d_gates = gates if ctx.delivery.last else torch.empty_like(gates)
        d_state, d_cell = d_states[order[-1]], d_last.clone()
        part, other = torch.empty_like(d_cell), torch.empty_like(d_cell)
        for at in range(len(order) - 1, -1, -1):
            t = order[at]
            i, f, g, o = gates[t].chunk(4, dim=1)
            d_i, d_f, d_g, d_o = d_gates[t].chunk(4, dim=1)
            before = cells[order[at - 1]] if at else first_cell
            # each gate is read for the last time before its gradient may overwrite it
            torch.mul(d_state, o, out=part)
            d_cell += _tanh_back(part, squashed[t], grad_input=other)
            _sigmoid_back(torch.mul(d_state, squashed[t], out=part), o, grad_input=d_o)
            torch.mul(d_cell, i, out=other)
            _sigmoid_back(torch.mul(d_cell, g, out=part), i, grad_input=d_i)
            _tanh_back(other, g, grad_input=d_g)
            torch.mul(d_cell, before, out=part)
            d_cell.mul_(f)
            _sigmoid_back(part, f, grad_input=d_f)
            d_state = d_gates[t] @ w_hh
            if at:
                d_state += d_states[order[at - 1]]
        d_inputs = d_gates @ w_ih if ctx.needs_input_grad[0] else None
        return d_inputs, d_gates, d_state, d_cell, None, None, None, None, None, None
