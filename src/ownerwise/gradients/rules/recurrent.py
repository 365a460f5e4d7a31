"""The rules for RNN, LSTM and GRU: cells, and layers of any depth in one or both directions.

Each direction of a layer consists of a projection of the whole input (an ordinary tapped
``linear``) followed by a time loop. The recurrent weights are used at every time step, so their
gradient is a sum of outer products over time, ``sum_t gates_gradient[t] (x) state[t - 1]``. To
obtain the gradient of the gates, zeros ``[T, B, gates]`` are added to the recurrent part of the
gates and tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import name_of
from ownerwise.gradients.contributions import Contribution, Dense, Outer, SharedLeft
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.problems import PROJECTED_LSTM, Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.rules.linear import project
from ownerwise.gradients.rules.lstm import LSTM
from ownerwise.gradients.rules.pointwise import as_single_record
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.tracked_parameters import TrackedParameter
from ownerwise.gradients.workspace import Loan

__all__ = ["cell", "gru", "lstm"]


def lstm(context: Context, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Handle ``lstm``."""
    if isinstance(rest[0], Tensor):
        raise _packed(func)
    (first, first_cell), *others = rest
    output, states, cells = _layers(context, func, input, (first, first_cell), *others)
    return output, states, cells


def gru(context: Context, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Handle ``gru``, ``rnn_tanh`` and ``rnn_relu``, which have the same signature."""
    if isinstance(rest[1], Tensor):
        raise _packed(func)
    first, *others = rest
    return _layers(context, func, input, (first,), *others)[:2]


def _packed(func: Callable[..., Any]) -> Refused:
    return Refused(
        name_of(func),
        "the entries of a packed sequence are ordered by time, not by record",
        "pad the sequences, pass them unpacked, and mask the outputs beyond each length",
    )


def _layers(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    firsts: tuple[Tensor, ...],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    name = name_of(func)
    if input.dim() == 3 and input.shape[0 if batch_first else 1] == 1:
        firsts = tuple(as_single_record(context, func, first) for first in firsts)
    if any(context.tracked(t) is not None for t in (input, *firsts)):
        raise Refused(
            name,
            "its input or initial state is a parameter",
            "expand the initial state to the batch size: state.expand(-1, len(x), -1)",
        )
    if input.dim() != 3:
        raise Refused(name, "its input lacks a batch dimension", "pass [records, time, features]")
    if len(params) != num_layers * directions * per_layer:
        raise Refused(name, *PROJECTED_LSTM)
    hidden = input.transpose(0, 1) if batch_first else input
    states, cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = params[at * per_layer : (at + 1) * per_layer]
            start = [f[at] for f in firsts]
            out, last, last_cell = _direction(context, func, hidden, start, weights, direction == 1)
            outputs.append(out)
            states.append(last)
            cells.append(last_cell)
        hidden = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        if dropout and train and layer < num_layers - 1:
            hidden = functional.dropout(hidden, dropout)
    output = hidden.transpose(0, 1) if batch_first else hidden
    return output, torch.stack(states), torch.stack(cells) if len(firsts) > 1 else None


def _direction(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs ``[T, B, H]``, last state and last cell state in one direction."""
    order = range(len(input))[::-1] if backwards else range(len(input))
    if name_of(func) == "lstm":
        return _lstm_direction(context, func, input, firsts, weights, order)
    weight, recurrent, *biases = weights
    bias, recurrent_bias = biases or (None, None)
    matrix, offset = context.value(recurrent), context.value(recurrent_bias)
    first = Saved(firsts[0], name_of(func))
    before: list[Tensor] = []  # the state before each step except the first

    def states_before() -> Tensor:
        states = [first.get(), *before]
        return torch.stack(states[::-1] if backwards else states)

    gates = project(context, functional.linear, input, weight, bias)
    zeros = input.new_zeros(()).expand(gates.shape)
    extra = _tap(context, func, zeros, [_Use(context, recurrent, recurrent_bias, states_before)])
    state, outputs = firsts[0], [input] * len(input)
    gate, added = gates.unbind(0), extra.unbind(0)
    for t in order:
        if t != order[0]:
            before.append(state.detach())
        from_state = torch.addmm(added[t], state, matrix.t())
        if offset is not None:
            from_state = from_state + offset
        (state,) = _advance(name_of(func), gate[t], from_state, [state])
        outputs[t] = state
    return torch.stack(outputs), state, None


def _lstm_direction(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: range,
) -> tuple[Tensor, Tensor, Tensor]:
    """Handle an LSTM, whose matrices share a tap because they contribute to the same gates."""
    weight, recurrent, *biases = weights
    bias, recurrent_bias = biases or (None, None)
    input = input.contiguous()
    saved, first = Saved(input, "lstm"), Saved(firsts[0], "lstm")

    def states_before() -> Tensor:
        ends, states = first.get()[None], outputs.get()
        return torch.cat([states[1:], ends] if order.step < 0 else [ends, states[:-1]])

    uses = [
        _Use(context, recurrent, recurrent_bias, states_before),
        _Use(context, weight, bias, saved.get),
    ]
    shape = (*input.shape[:2], len(weight))
    loan = context.budget.workspace.loan(shape, input)
    zeros = input.new_zeros(()).expand(shape)
    stand_in = _tap(context, func, zeros, uses, loan)
    total = context.value(bias) + context.value(recurrent_bias) if biases else None
    matrices = (context.value(weight), context.value(recurrent))
    out, last_cell = LSTM.apply(  # type: ignore[misc]
        input, stand_in, *firsts, *matrices, total, order, loan, context.in_last_pass
    )
    outputs = Saved(out, "lstm")
    return out, out[order[-1]], last_cell


class _Use:
    """A matrix and a bias that contribute to the gates, and the inputs of the matrix."""

    def __init__(
        self, context: Context, weight: Tensor, bias: Tensor | None, right: Callable[[], Tensor]
    ) -> None:
        self.weight = context.tracked(weight)
        self.bias = context.tracked(bias)
        self.right = right  # [T, B, columns]


def _tap(
    context: Context,
    func: Callable[..., Any],
    stand_in: Tensor,
    uses: list[_Use],
    loan: Loan | None = None,
) -> Tensor:
    """Tap the zeros added to the gates; their gradient may be stored in the block of ``loan``."""
    used = [s for use in uses for s in (use.weight, use.bias) if s is not None]
    if not used:
        return stand_in
    budget = context.budget

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[TrackedParameter, Contribution]]:
        left = gradient.transpose(0, 1)  # records lie along dimension 1, or there is only one
        shared = SharedLeft(left, loan)
        total = left.sum(dim=1, dtype=accumulation_dtype(left.dtype))
        for use in uses:
            if use.bias is not None:
                yield use.bias, Dense(total)
            if use.weight is not None:
                yield use.weight, Outer(left, use.right().transpose(0, 1), budget, shared)

    return context.tap(func, stand_in, used, (1,), build)


def _advance(
    kind: str, from_input: Tensor, from_state: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Take one time step: return the next state and, for an LSTM, the next cell state."""
    if kind.startswith("lstm"):
        i, f, g, o = (from_input + from_state).chunk(4, dim=-1)
        after = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * after.tanh(), after
    if kind.startswith("gru"):
        r, z, n = from_input.chunk(3, dim=-1)
        r_state, z_state, n_state = from_state.chunk(3, dim=-1)
        n = (n + (r + r_state).sigmoid() * n_state).tanh()
        return (torch.lerp(n, states[0], (z + z_state).sigmoid()),)
    total = from_input + from_state
    return (total.relu() if kind.startswith("rnn_relu") else total.tanh(),)


def cell(
    context: Context,
    func: Callable[..., Any],
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Handle ``lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell``."""
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    if len(input) == 1:
        states = [as_single_record(context, func, state) for state in states]
    if any(context.tracked(t) is not None for t in (input, *states)):
        return NotImplemented
    from_input = project(context, functional.linear, input, w_ih, b_ih)
    from_state = project(context, functional.linear, states[0], w_hh, b_hh)
    after = _advance(name_of(func), from_input, from_state, states)
    return after if name_of(func) == "lstm_cell" else after[0]
