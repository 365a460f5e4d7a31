"""The rules for RNN, LSTM and GRU: cells, and layers of any depth in one or both directions.

Each direction of a layer consists of a projection of the whole input (an ordinary tapped
`linear`) followed by a time loop. The recurrent weights are used at every time step, so their
gradient is a sum of outer products over time, `sum_t gates_gradient[t] (x) state[t - 1]`. To
obtain the gradient of the gates, zeros `[T, B, gates]` are added to the recurrent part of the
gates and tapped. A plain LSTM has its own loop (`lstm`), which is faster. Packed sequences are
unpacked; records that have ended keep their states. Where autocast is on, a layer computes in the
type of its weights, and its outputs have the type of its input.
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
from ownerwise.gradients.precision import accumulation_dtype, without_autocast
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.rules.linear import project
from ownerwise.gradients.rules.lstm import LSTM
from ownerwise.gradients.rules.packed import Packing
from ownerwise.gradients.rules.pointwise import as_single_record
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use
from ownerwise.gradients.workspace import Loan

__all__ = ["cell", "recurrent"]


def recurrent(context: Context, func: Function, *args: Any) -> tuple[Tensor, ...]:
    """Handle `lstm`, `gru`, `rnn_tanh` and `rnn_relu`, which have the same signature.

    The arguments are the input, the initial states, the weights, whether there are biases, the
    number of layers, the dropout probability, whether the layer is in training mode, whether it is
    bidirectional, and whether records come first. For a packed sequence, its batch sizes follow the
    input, and the last argument is missing.
    """
    input, *rest = args
    packing = None
    if not isinstance(rest[2], bool):
        sizes, *rest = rest
        known = context.packings.get(id(sizes))
        packing = Packing(sizes, None if known is None else known[1])
    hx, params, has_biases, num_layers, dropout, train, bidirectional, *first = rest
    batch_first = bool(first and first[0])
    name = name_of(func)
    firsts = list(hx) if func is torch.lstm else [hx]  # hidden states and, for an LSTM, cell states
    if packing is None and input.dim() == 3 and input.shape[0 if batch_first else 1] == 1:
        firsts = [as_single_record(context, func, first) for first in firsts]
    if any(context.tracked(t) is not None for t in (input, *firsts)):
        raise Refused(
            name,
            "its input or initial state is a parameter",
            "expand the initial state to the batch size: state.expand(-1, len(x), -1)",
        )
    if packing is None and input.dim() != 3:
        raise Refused(name, "its input lacks a batch dimension", "pass [records, time, features]")
    context.reformatted = True
    given, dtype = input.dtype, params[0].dtype
    with without_autocast(input.device):
        if packing is not None:
            hidden = packing.unpacked(input)
            firsts = [packing.in_order(first) for first in firsts]
        else:
            hidden = input.transpose(0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        per_layer = len(params) // (num_layers * directions)
        projected = per_layer > (4 if has_biases else 2)
        plain_lstm = func is torch.lstm and not projected and packing is None
        hidden, firsts = hidden.to(dtype), [first.to(dtype) for first in firsts]
        steps = range(len(hidden))
        lasts = []
        for layer in range(num_layers):
            outputs = []
            for order in (steps, steps[::-1])[:directions]:
                at = len(lasts)
                weights = params[at * per_layer : (at + 1) * per_layer]
                states = [first[at] for first in firsts]
                if plain_lstm:
                    output, *last = _lstm_direction(context, func, hidden, states, weights, order)
                else:
                    real = None if packing is None else packing.real
                    output, *last = _direction(
                        context, func, hidden, states, weights, order, real, projected
                    )
                outputs.append(output)
                lasts.append(last)
            hidden = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
            if dropout and train and layer < num_layers - 1:
                hidden = functional.dropout(hidden, dropout)
        hidden = hidden.to(given)
        ends = [torch.stack(states).to(given) for states in zip(*lasts, strict=True)]
    if packing is not None:
        return packing.packed(hidden), *map(packing.sorted, ends)
    return hidden.transpose(0, 1) if batch_first else hidden, *ends


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
    given, dtype = input.dtype, w_ih.dtype
    with without_autocast(input.device):
        input, states = input.to(dtype), [state.to(dtype) for state in states]
        from_input = project(context, functional.linear, input, w_ih, b_ih)
        from_state = project(context, functional.linear, states[0], w_hh, b_hh)
        after = _advance(name_of(func), from_input, from_state, states)
        after = tuple(state.to(given) for state in after)
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
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: range,
    real: Sequence[Tensor] | None = None,
    projected: bool = False,
) -> tuple[Tensor, ...]:
    """Run a layer in one direction: return the outputs `[T, B, H]` and the last states.

    Args:
        states: the initial hidden state and, for an LSTM, cell state.
        weights: the two matrices, their biases if any, and the matrix of the projection if any.
        order: the time steps in the order of the loop.
        real: for each time step, which records have an entry; the others keep their states.
        projected: whether the hidden state of an LSTM is projected.
    """
    w_ih, w_hh, *biases = weights
    w_hr = biases.pop() if projected else None
    b_ih, b_hh = biases or (None, None)
    kind, before, inner = name_of(func), [], []

    def by_time(saved: list[Saved]) -> Tensor:
        return torch.stack([state.get() for state in saved[:: order.step]])

    gates = project(context, functional.linear, input, w_ih, b_ih)
    products = [(w_hh, b_hh, lambda: by_time(before))]
    zeros = _tapped_zeros(context, func, input, gates.shape, products)
    w_hh, b_hh = context.value(w_hh), context.value(b_hh)
    gate, zero = gates.unbind(0), zeros.unbind(0)
    shift = ()
    if w_hr is not None:
        shape = (*gates.shape[:2], len(w_hr))
        shift = _tapped_zeros(context, func, input, shape, [(w_hr, None, lambda: by_time(inner))])
        shift, w_hr = shift.unbind(0), context.value(w_hr)
    outputs = [input] * len(input)
    for t in order:
        before.append(Saved(states[0], kind))
        from_state = torch.addmm(zero[t], states[0], w_hh.t())
        if b_hh is not None:
            from_state = from_state + b_hh
        after = _advance(kind, gate[t], from_state, states)
        if w_hr is not None:
            inner.append(Saved(after[0], kind))
            after = torch.addmm(shift[t], after[0], w_hr.t()), *after[1:]
        if real is not None:
            there = real[t].to(input.device)
            after = [torch.where(there, *pair) for pair in zip(after, states, strict=True)]
        states = after
        outputs[t] = states[0]
    return torch.stack(outputs), *states


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
    columns = input.shape[2]
    joined = input.new_empty(*input.shape[:2], columns + w_hh.shape[1])
    shape = (*input.shape[:2], len(w_ih))
    loan = context.budget.workspace.loan(shape, input)
    products = [(w_hh, b_hh, lambda: joined[..., columns:])]
    products.append((w_ih, b_ih, lambda: joined[..., :columns]))
    zeros = _tapped_zeros(context, func, input, shape, products, loan)
    bias = None if b_ih is None else context.value(b_ih) + context.value(b_hh)
    matrices = (context.value(w_ih), context.value(w_hh))
    out, last_cell = LSTM.apply(  # type: ignore[misc]
        input, zeros, *firsts, *matrices, bias, order, joined, loan, context.delivery
    )
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
        loan: the memory in which the gradient may be stored. The zeros are then never read, so
            they are left out.
    """
    zeros = input.new_zeros(()).expand(shape) if loan is None else input.new_empty(shape)
    tracked = [(context.tracked(m), context.tracked(b), right) for m, b, right in products]
    used = [parameter for *pair, _ in tracked for parameter in pair if parameter is not None]
    if not used:
        return zeros
    budget = context.budget

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        left = layout.terms(gradient, count)  # [records, terms, gates]
        shared = SharedLeft(left, loan)
        total = left.sum(dim=1, dtype=accumulation_dtype(left.dtype))
        for matrix, bias, right in tracked:
            if bias is not None:
                yield bias, Dense(total)
            if matrix is not None:
                yield matrix, Outer(left, layout.terms(right(), count), budget, shared)

    return context.tap(func, zeros, used, (1,), build)
