"""The rules for RNN, LSTM and GRU: cells, and layers of any depth in one or both directions.

Each direction of a layer consists of a projection of the whole input (an ordinary tapped
`linear`) followed by a time loop. The recurrent weights are used at every time step, so their
gradient is a sum of outer products over time, `sum_t gates_gradient[t] (x) state[t - 1]`. To
obtain the gradient of the gates, zeros `[T, B, gates]` are added to the recurrent part of the
gates and tapped. An LSTM has its own loop (`lstm`), which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function, name_of
from ownerwise.gradients.contributions import Dense, Outer, SharedLeft
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.precision import accumulation_dtype
from ownerwise.gradients.problems import PROJECTED_LSTM, Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.rules.linear import project
from ownerwise.gradients.rules.lstm import LSTM
from ownerwise.gradients.rules.pointwise import as_single_record
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use
from ownerwise.gradients.workspace import Loan

__all__ = ["cell", "recurrent"]


def recurrent(
    context: Context,
    func: Function,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Handle `lstm`, `gru`, `rnn_tanh` and `rnn_relu`, which have the same signature."""
    name = name_of(func)
    if not isinstance(has_biases, bool):  # batch sizes precede the other arguments
        raise Refused(
            name,
            "the entries of a packed sequence are ordered by time, not by record",
            "pad the sequences, pass them unpacked, and mask the outputs beyond each length",
        )
    firsts = list(hx) if func is torch.lstm else [hx]  # hidden states and, for an LSTM, cell states
    if input.dim() == 3 and input.shape[0 if batch_first else 1] == 1:
        firsts = [as_single_record(context, func, first) for first in firsts]
    if any(context.tracked(t) is not None for t in (input, *firsts)):
        raise Refused(
            name,
            "its input or initial state is a parameter",
            "expand the initial state to the batch size: state.expand(-1, len(x), -1)",
        )
    if input.dim() != 3:
        raise Refused(name, "its input lacks a batch dimension", "pass [records, time, features]")
    directions, per_layer = 2 if bidirectional else 1, 4 if has_biases else 2
    if len(params) != num_layers * directions * per_layer:
        raise Refused(name, *PROJECTED_LSTM)
    context.reformatted = True
    run = _lstm_direction if func is torch.lstm else _direction
    hidden = input.transpose(0, 1) if batch_first else input
    steps = range(len(hidden))
    lasts = []
    for layer in range(num_layers):
        outputs = []
        for order in (steps, steps[::-1])[:directions]:
            at = len(lasts)
            weights = params[at * per_layer : (at + 1) * per_layer]
            output, *last = run(context, func, hidden, [f[at] for f in firsts], weights, order)
            outputs.append(output)
            lasts.append(last)
        hidden = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        if dropout and train and layer < num_layers - 1:
            hidden = functional.dropout(hidden, dropout)
    output = hidden.transpose(0, 1) if batch_first else hidden
    return output, *map(torch.stack, zip(*lasts, strict=True))


def cell(
    context: Context,
    func: Function,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Handle `lstm_cell`, `gru_cell`, `rnn_tanh_cell` and `rnn_relu_cell`."""
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    if len(input) == 1:
        states = [as_single_record(context, func, state) for state in states]
    if any(context.tracked(t) is not None for t in (input, *states)):
        return NotImplemented
    from_input = project(context, functional.linear, input, w_ih, b_ih)
    from_state = project(context, functional.linear, states[0], w_hh, b_hh)
    after = _advance(name_of(func), from_input, from_state, states)
    return after if func is torch.lstm_cell else after[0]


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


def _direction(
    context: Context,
    func: Function,
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: range,
) -> tuple[Tensor, ...]:
    """Run an RNN or GRU: return the outputs `[T, B, H]` and the last state."""
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    kind, before = name_of(func), []

    def states_before() -> Tensor:
        return torch.stack([state.get() for state in before[:: order.step]])

    gates = project(context, functional.linear, input, w_ih, b_ih)
    zeros = _tapped_zeros(context, func, input, gates.shape, [(w_hh, b_hh, states_before)])
    w_hh, b_hh = context.value(w_hh), context.value(b_hh)
    gate, zero = gates.unbind(0), zeros.unbind(0)
    (state,), outputs = firsts, [input] * len(input)
    for t in order:
        before.append(Saved(state, kind))
        from_state = torch.addmm(zero[t], state, w_hh.t())
        if b_hh is not None:
            from_state = from_state + b_hh
        (state,) = _advance(kind, gate[t], from_state, [state])
        outputs[t] = state
    return torch.stack(outputs), state


def _lstm_direction(
    context: Context,
    func: Function,
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: range,
) -> tuple[Tensor, ...]:
    """Run an LSTM: return the outputs `[T, B, H]`, the last state and the last cell state.

    Its two matrices share a tap because they contribute to the same gates.
    """
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    input = input.contiguous()
    saved, first = Saved(input, "lstm"), Saved(firsts[0], "lstm")

    def states_before() -> Tensor:  # called in the backward pass, when `outputs` below is set
        ends, states = first.get()[None], outputs.get()
        return torch.cat([states[1:], ends] if order.step < 0 else [ends, states[:-1]])

    shape = (*input.shape[:2], len(w_ih))
    loan = context.budget.workspace.loan(shape, input)
    products = [(w_hh, b_hh, states_before), (w_ih, b_ih, saved.get)]
    zeros = _tapped_zeros(context, func, input, shape, products, loan)
    bias = None if b_ih is None else context.value(b_ih) + context.value(b_hh)
    matrices = (context.value(w_ih), context.value(w_hh))
    out, last_cell = LSTM.apply(  # type: ignore[misc]
        input, zeros, *firsts, *matrices, bias, order, loan, context.delivery
    )
    outputs = Saved(out, "lstm")
    return out, out[order[-1]], last_cell


def _tapped_zeros(
    context: Context,
    func: Function,
    input: Tensor,
    shape: tuple[int, ...],
    products: list[tuple[Tensor, Tensor | None, Callable[[], Tensor]]],
    loan: Loan | None = None,
) -> Tensor:
    """Return zeros to add to the gates, tapped to receive the gradient of the gates.

    Args:
        input: a tensor of the gates' type.
        shape: the shape of the gates, `[T, B, gates]`.
        products: each matrix and bias that contribute to the gates, and a function that returns the
            inputs of the matrix, `[T, B, columns]`.
        loan: the memory in which the gradient may be stored.
    """
    zeros = input.new_zeros(()).expand(shape)
    tracked = [(context.tracked(m), context.tracked(b), right) for m, b, right in products]
    used = [parameter for *pair, _ in tracked for parameter in pair if parameter is not None]
    if not used:
        return zeros
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        left = gradient.transpose(
            0, 1
        )  # records lie along dimension 1, or there is only one record
        shared = SharedLeft(left, loan)
        total = left.sum(dim=1, dtype=accumulation_dtype(left.dtype))
        for matrix, bias, right in tracked:
            if bias is not None:
                yield bias, Dense(total)
            if matrix is not None:
                yield matrix, Outer(left, right().transpose(0, 1), budget, shared)

    return context.tap(func, zeros, used, (1,), build)
