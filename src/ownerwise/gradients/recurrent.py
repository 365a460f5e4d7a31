"""RNN, LSTM and GRU layers and cells, several layers, both directions.

Each layer and direction is a projection of the whole input (an ordinary tapped ``linear``) and a
time loop. The recurrent weights are used at every time step: their gradient is
``sum_t gates_gradient[t] (x) state[t - 1]``, a sum of outer products over time. The gradient of the
gates is that of a stand-in, zeros ``[T, B, gates]`` that are added to their recurrent part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import Contribution, Dense, Saved, accumulation_dtype
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.linear import project
from ownerwise.gradients.outer import Outer, SharedLeft
from ownerwise.gradients.pointwise import as_single_record
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.recurrence import LSTM
from ownerwise.gradients.sources import Source, name_of
from ownerwise.gradients.workspace import Loan

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["cell", "gru", "lstm", "rnn"]


def lstm(tape: Tape, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Rule of ``lstm``."""
    if isinstance(rest[0], Tensor):
        raise _packed(func)
    (first, first_cell), *others = rest
    output, states, cells = _layers(tape, func, input, (first, first_cell), *others)
    return output, states, cells


def gru(tape: Tape, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Rule of ``gru``."""
    if isinstance(rest[1], Tensor):
        raise _packed(func)
    first, *others = rest
    return _layers(tape, func, input, (first,), *others)[:2]


rnn = gru  # rnn_tanh and rnn_relu have the signature of gru


def _packed(func: Callable[..., Any]) -> Refused:
    return Refused(
        name_of(func),
        "a packed sequence orders records by length and time",
        "pad the sequences, pass them unpacked, and mask the outputs beyond each length",
    )


def _layers(
    tape: Tape,
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
        firsts = tuple(as_single_record(tape, func, first) for first in firsts)
    if any(tape.source(t) is not None for t in (input, *firsts)):
        raise Refused(
            name,
            "its input or initial state is a parameter",
            "expand the initial state to the batch: state.expand(-1, len(x), -1)",
        )
    if input.dim() != 3:
        raise Refused(name, "input without a batch dimension", "pass [records, time, features]")
    if len(params) != num_layers * directions * per_layer:
        raise Refused(name, "proj_size is not supported", "use a linear layer after the LSTM")
    hidden = input.transpose(0, 1) if batch_first else input
    states, cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = params[at * per_layer : (at + 1) * per_layer]
            start = [f[at] for f in firsts]
            out, last, last_cell = _direction(tape, func, hidden, start, weights, direction == 1)
            outputs.append(out)
            states.append(last)
            cells.append(last_cell)
        hidden = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        if dropout and train and layer < num_layers - 1:
            hidden = functional.dropout(hidden, dropout)
    output = hidden.transpose(0, 1) if batch_first else hidden
    return output, torch.stack(states), torch.stack(cells) if len(firsts) > 1 else None


def _direction(
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[T, B, H]``, last state and last cell of one layer in one direction."""
    order = range(len(input))[::-1] if backwards else range(len(input))
    if name_of(func) == "lstm":
        return _lstm_direction(tape, func, input, firsts, weights, order)
    weight, recurrent, *biases = weights
    bias, recurrent_bias = biases or (None, None)
    matrix, offset = tape.value(recurrent), tape.value(recurrent_bias)
    first = Saved(firsts[0], name_of(func))
    before: list[Tensor] = []  # the states that all steps but the first began with

    def states_before() -> Tensor:
        states = [first.get(), *before]
        return torch.stack(states[::-1] if backwards else states)

    gates = project(tape, functional.linear, input, weight, bias)
    zeros = input.new_zeros(()).expand(gates.shape)
    extra = _tap(tape, func, zeros, [_Use(tape, recurrent, recurrent_bias, states_before)])
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
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    firsts: Sequence[Tensor],
    weights: Sequence[Tensor],
    order: range,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for an LSTM: one tap serves both matrices, whose gates have the same gradient."""
    weight, recurrent, *biases = weights
    bias, recurrent_bias = biases or (None, None)
    input = input.contiguous()
    saved, first = Saved(input, "lstm"), Saved(firsts[0], "lstm")

    def states_before() -> Tensor:
        ends, states = first.get()[None], outputs.get()
        return torch.cat([states[1:], ends] if order.step < 0 else [ends, states[:-1]])

    uses = [
        _Use(tape, recurrent, recurrent_bias, states_before),
        _Use(tape, weight, bias, saved.get),
    ]
    shape = (*input.shape[:2], len(weight))
    loan = tape.policy.workspace.loan(shape, input)
    zeros = input.new_zeros(()).expand(shape)
    stand_in = _tap(tape, func, zeros, uses, loan)
    total = tape.value(bias) + tape.value(recurrent_bias) if biases else None
    matrices = (tape.value(weight), tape.value(recurrent))
    out, last_cell = LSTM.apply(  # type: ignore[misc]
        input, stand_in, *firsts, *matrices, total, order, loan, tape.in_last_pass
    )
    outputs = Saved(out, "lstm")
    return out, out[order[-1]], last_cell


class _Use:
    """A matrix and a bias that add to the gates, and what the matrix is applied to."""

    def __init__(
        self, tape: Tape, weight: Tensor, bias: Tensor | None, right: Callable[[], Tensor]
    ) -> None:
        self.weight: Source | None = tape.source(weight)
        self.bias: Source | None = tape.source(bias)
        self.right = right  # [T, B, columns]


def _tap(
    tape: Tape,
    func: Callable[..., Any],
    stand_in: Tensor,
    uses: list[_Use],
    loan: Loan | None = None,
) -> Tensor:
    """Tap the stand-in for the recurrent part of the gates, whose gradient is in ``loan``."""
    sources = [s for use in uses for s in (use.weight, use.bias) if s is not None]
    if not sources:
        return stand_in
    policy = tape.policy

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        left = gradient.transpose(0, 1)  # records lie along dimension 1, or there is one
        shared = SharedLeft(left, loan)
        total = left.sum(dim=1, dtype=accumulation_dtype(left.dtype))
        for use in uses:
            if use.bias is not None:
                yield use.bias, Dense(total)
            if use.weight is not None:
                yield use.weight, Outer(left, use.right().transpose(0, 1), policy, shared)

    return tape.tap(func, stand_in, sources, (1,), build)


def _advance(
    kind: str, from_input: Tensor, from_state: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """One time step: the next state, and the next cell of an LSTM."""
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
    tape: Tape,
    func: Callable[..., Any],
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Rule of ``lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` and ``rnn_relu_cell``."""
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    if len(input) == 1:
        states = [as_single_record(tape, func, state) for state in states]
    if any(tape.source(t) is not None for t in (input, *states)):
        return NotImplemented
    from_input = project(tape, functional.linear, input, w_ih, b_ih)
    from_state = project(tape, functional.linear, states[0], w_hh, b_hh)
    after = _advance(name_of(func), from_input, from_state, states)
    return after if len(after) > 1 else after[0]
