"""The time loops of RNN, LSTM and GRU layers, forward and backward, written out.

Torch's own recurrent calls hide the gate gradients that per-record gradients are made of. These
loops compute the same values, and their backward passes return the gradient of the gates with
respect to the input part and to the recurrent part. What can be computed for all time steps at once
is, so that the loop itself is a product, and a few entry-by-entry calls.

Shapes: ``T`` time steps, ``B`` records, ``H`` hidden units, ``G = 1, 3 or 4`` gates.
``projected [T, B, G*H]``: input part of the gates; ``recurrent``: a stand-in of the same shape for
the recurrent part, whose gradient is what the recurrent weights need; ``weight [G*H, H]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["GRU", "LSTM", "RNN"]


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
    ) -> tuple[Tensor, Tensor]:
        """States ``[T, B, H]`` and the last cell ``[B, H]``."""
        steps, count, _ = projected.shape
        size = weight.shape[1]
        gates = torch.empty_like(projected)
        states = projected.new_empty(steps + 1, count, size)
        cells = projected.new_empty(steps + 1, count, size)
        states[0], cells[0] = first, first_cell
        transposed = weight.t()
        for t in range(steps):
            gate = torch.addmm(projected[t], states[t], transposed, out=gates[t])
            gate[:, : 2 * size].sigmoid_()
            gate[:, 3 * size :].sigmoid_()
            i, f, g, o = gate.chunk(4, dim=1)
            g.tanh_()
            torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
            torch.tanh(cells[t + 1], out=states[t + 1]).mul_(o)
        ctx.save_for_backward(gates, cells, weight)
        return states[1:], cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of both parts of the gates (the same), of the first state and of the first cell."""
        d_states, d_last = gradients
        gates, cells, weight = ctx.saved_tensors
        size = weight.shape[1]
        i, f, g, o = gates.chunk(4, dim=2)
        squashed = torch.tanh(cells[1:])
        to_cell = (1 - squashed.square()).mul_(o)
        d_gates = torch.empty_like(gates)  # local derivatives first, gate gradients in the end
        slope = torch.addcmul(gates, gates, gates, value=-1)  # s (1 - s), right for i, f, o
        torch.mul(slope[..., :size], g, out=d_gates[..., :size])
        torch.mul(slope[..., size : 2 * size], cells[:-1], out=d_gates[..., size : 2 * size])
        torch.mul(1 - g.square(), i, out=d_gates[..., 2 * size : 3 * size])
        torch.mul(slope[..., 3 * size :], squashed, out=d_gates[..., 3 * size :])
        d_state = d_states[-1]
        d_cell = d_last.clone()
        for t in range(len(gates) - 1, -1, -1):
            d_cell.addcmul_(d_state, to_cell[t])
            d_gate = d_gates[t]
            d_gate[:, : 3 * size].unflatten(1, (3, size)).mul_(d_cell[:, None])
            d_gate[:, 3 * size :].mul_(d_state)
            d_cell.mul_(f[t])
            d_state = torch.addmm(d_states[t - 1], d_gate, weight) if t else d_gate @ weight
        return d_gates, d_gates, d_state, d_cell, None


class RNN(torch.autograd.Function):
    """One gate with tanh or relu; ``projected`` already holds both biases."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, recurrent: Tensor, first: Tensor, weight: Tensor, relu: bool
    ) -> Tensor:
        """States ``[T, B, H]``."""
        steps, count, size = projected.shape
        states = projected.new_empty(steps + 1, count, size)
        states[0] = first
        transposed = weight.t()
        for t in range(steps):
            state = torch.addmm(projected[t], states[t], transposed, out=states[t + 1])
            if relu:
                state.relu_()
            else:
                state.tanh_()
        ctx.save_for_backward(states, weight)
        ctx.relu = relu
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of the input part and the recurrent part of the gates, and of the first state."""
        (d_states,) = gradients
        states, weight = ctx.saved_tensors
        after = states[1:]
        d_gates = (after > 0).to(after.dtype) if ctx.relu else 1 - after.square()
        d_state = d_states[-1]
        for t in range(len(d_gates) - 1, -1, -1):
            d_gate = d_gates[t].mul_(d_state)
            d_state = torch.addmm(d_states[t - 1], d_gate, weight) if t else d_gate @ weight
        return d_gates, d_gates, d_state, None, None


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
    ) -> Tensor:
        """States ``[T, B, H]``."""
        steps, count, _ = projected.shape
        size = weight.shape[1]
        gates = torch.empty_like(projected)
        hidden = projected.new_empty(steps, count, size)  # recurrent part of n, before r
        states = projected.new_empty(steps + 1, count, size)
        states[0] = first
        for t in range(steps):
            part = torch.nn.functional.linear(states[t], weight, bias)
            gate = gates[t]
            both = gate[:, : 2 * size]
            torch.add(projected[t][:, : 2 * size], part[:, : 2 * size], out=both).sigmoid_()
            r, z, n = gate.chunk(3, dim=1)
            hidden[t] = part[:, 2 * size :]
            torch.addcmul(projected[t][:, 2 * size :], r, hidden[t], out=n).tanh_()
            torch.lerp(n, states[t], z, out=states[t + 1])
        ctx.save_for_backward(gates, hidden, states, weight)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of the input part and the recurrent part of the gates, and of the first state."""
        (d_states,) = gradients
        gates, hidden, states, weight = ctx.saved_tensors
        size = weight.shape[1]
        r, z, n = gates.chunk(3, dim=2)
        d_input = torch.empty_like(gates)
        d_r, d_z, d_n = d_input.chunk(3, dim=2)
        torch.mul(1 - z, 1 - n.square(), out=d_n)
        torch.mul(states[:-1] - n, z - z.square(), out=d_z)
        torch.mul(d_n * hidden, r - r.square(), out=d_r)
        d_recurrent = d_input.clone()
        d_recurrent[..., 2 * size :].mul_(r)
        d_state = d_states[-1]
        for t in range(len(gates) - 1, -1, -1):
            spread = d_state[:, None]
            d_input[t].unflatten(1, (3, size)).mul_(spread)
            d_gate = d_recurrent[t]
            d_gate.unflatten(1, (3, size)).mul_(spread)
            d_state = torch.addmm(d_state * z[t], d_gate, weight)
            if t:
                d_state += d_states[t - 1]
        return d_input, d_recurrent, d_state, None, None
