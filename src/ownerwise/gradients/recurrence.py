"""The time loops of RNN, LSTM and GRU layers, forward and backward, written out.

Torch's own recurrent calls hide the gate gradients that per-record gradients are made of. These
loops compute the same values, and their backward passes return the gradients of the gates. All
entry-by-entry work is done step by step, on blocks that stay in cache.

Shapes: ``B`` records, ``T`` time steps, ``H`` hidden units, ``G = 1, 3 or 4`` gates; records first,
so that the outer products over time of each record lie together. ``projected [B, T, G*H]``: input
part of the gates; ``recurrent``: a stand-in of the same shape for the recurrent part, whose gradient
is what the recurrent weights need; ``weight [G*H, H]``. ``order``: the time steps as walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["GRU", "LSTM", "RNN"]

_sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
_tanh_back = torch.ops.aten.tanh_backward.grad_input


class LSTM(torch.autograd.Function):
    """Gates i, f, g, o; ``projected`` already holds both biases."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        recurrent: Tensor,
        first: Tensor,
        first_cell: Tensor,
        weight: Tensor,
        order: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """States ``[B, T, H]`` and the last cell ``[B, H]``."""
        size = weight.shape[1]
        gates = torch.empty_like(projected)
        states = projected.new_empty(*projected.shape[:2], size)
        cells, squashed = torch.empty_like(states), torch.empty_like(states)
        transposed = weight.t()
        state, cell = first, first_cell
        for t in order:
            gate = torch.addmm(projected[:, t], state, transposed)
            i, f, g, o = gate.chunk(4, dim=1)
            gate[:, : 2 * size].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            gates[:, t] = gate
            cell = (f * cell).addcmul_(i, g)
            cells[:, t] = cell
            bent = torch.tanh(cell)
            squashed[:, t] = bent
            state = bent.mul_(o)
            states[:, t] = state
        ctx.save_for_backward(gates, cells, squashed, first_cell, weight)
        ctx.order = order
        return states, cell

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of both parts of the gates (the same), of the first state and of the first cell."""
        d_states, d_last = gradients
        gates, cells, squashed, first_cell, weight = ctx.saved_tensors
        d_gates = torch.empty_like(gates)
        order = ctx.order
        d_state = d_states[:, order[-1]]
        d_cell = d_last.clone()
        part, bent = torch.empty_like(d_cell), torch.empty_like(d_cell)
        d_gate = d_gates.new_empty(len(gates), gates.shape[2])
        d_i, d_f, d_g, d_o = d_gate.chunk(4, dim=1)
        for at in range(len(order) - 1, -1, -1):
            t = order[at]
            i, f, g, o = gates[:, t].chunk(4, dim=1)
            before = cells[:, order[at - 1]] if at else first_cell
            tanh_cell = squashed[:, t]
            torch.mul(d_state, o, out=part)
            d_cell += _tanh_back(part, tanh_cell, grad_input=bent)
            _sigmoid_back(torch.mul(d_state, tanh_cell, out=part), o, grad_input=d_o)
            _sigmoid_back(torch.mul(d_cell, g, out=part), i, grad_input=d_i)
            _sigmoid_back(torch.mul(d_cell, before, out=part), f, grad_input=d_f)
            _tanh_back(torch.mul(d_cell, i, out=part), g, grad_input=d_g)
            d_cell.mul_(f)
            d_gates[:, t] = d_gate
            if at:
                d_state = torch.addmm(d_states[:, order[at - 1]], d_gate, weight)
            else:
                d_state = d_gate @ weight
        return d_gates, d_gates, d_state, d_cell, None, None


class RNN(torch.autograd.Function):
    """One gate with tanh or relu; ``projected`` already holds both biases."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        recurrent: Tensor,
        first: Tensor,
        weight: Tensor,
        relu: bool,
        order: Sequence[int],
    ) -> Tensor:
        """States ``[B, T, H]``."""
        states = torch.empty_like(projected)
        transposed = weight.t()
        state = first
        for t in order:
            state = torch.addmm(projected[:, t], state, transposed)
            state = state.relu_() if relu else state.tanh_()
            states[:, t] = state
        ctx.save_for_backward(states, weight)
        ctx.relu, ctx.order = relu, order
        return states

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of both parts of the gate (the same), and of the first state."""
        (d_states,) = gradients
        states, weight = ctx.saved_tensors
        d_gates = torch.empty_like(states)
        order = ctx.order
        d_state = d_states[:, order[-1]]
        for at in range(len(order) - 1, -1, -1):
            after = states[:, order[at]]
            if ctx.relu:
                d_gate = d_state * (after > 0)
            else:
                d_gate = torch.ops.aten.tanh_backward(d_state, after)
            d_gates[:, order[at]] = d_gate
            d_state = d_gate @ weight
            if at:
                d_state += d_states[:, order[at - 1]]
        return d_gates, d_gates, d_state, None, None, None


class GRU(torch.autograd.Function):
    """Gates r, z, n; the recurrent bias stays apart, for r scales it in n."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        recurrent: Tensor,
        first: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        order: Sequence[int],
    ) -> Tensor:
        """States ``[B, T, H]``."""
        size = weight.shape[1]
        gates = torch.empty_like(projected)
        states = projected.new_empty(*projected.shape[:2], size)
        hidden = torch.empty_like(states)  # recurrent part of n, before r
        state = first
        for t in order:
            part = torch.nn.functional.linear(state, weight, bias)
            hidden[:, t] = part[:, 2 * size :]
            gate = projected[:, t].clone()
            gate[:, : 2 * size].add_(part[:, : 2 * size]).sigmoid_()
            r, z, n = gate.chunk(3, dim=1)
            n.addcmul_(r, part[:, 2 * size :]).tanh_()
            gates[:, t] = gate
            state = torch.lerp(n, state, z)
            states[:, t] = state
        ctx.save_for_backward(gates, hidden, states, first, weight)
        ctx.order = order
        return states

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of the input part and the recurrent part of the gates, and of the first state."""
        (d_states,) = gradients
        gates, hidden, states, first, weight = ctx.saved_tensors
        size = weight.shape[1]
        d_input, d_recurrent = torch.empty_like(gates), torch.empty_like(gates)
        order = ctx.order
        d_gate = gates.new_empty(len(gates), gates.shape[2])
        d_r, d_z, d_n = d_gate.chunk(3, dim=1)
        d_state = d_states[:, order[-1]]
        for at in range(len(order) - 1, -1, -1):
            t = order[at]
            r, z, n = gates[:, t].chunk(3, dim=1)
            before = states[:, order[at - 1]] if at else first
            _tanh_back(d_state * (1 - z), n, grad_input=d_n)
            _sigmoid_back(d_state * (before - n), z, grad_input=d_z)
            _sigmoid_back(d_n * hidden[:, t], r, grad_input=d_r)
            d_input[:, t] = d_gate
            d_n.mul_(r)
            d_recurrent[:, t] = d_gate
            d_state = torch.addmm(d_state * z, d_gate, weight)
            if at:
                d_state += d_states[:, order[at - 1]]
        return d_input, d_recurrent, d_state, None, None, None
