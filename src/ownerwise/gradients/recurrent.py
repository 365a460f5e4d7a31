"""RNN, LSTM and GRU layers and cells, several layers, both directions.

Each layer and direction is a projection of the whole input (an ordinary tapped ``linear``) and a
time loop (:mod:`recurrence`). The recurrent weights are used at every time step: their gradient is
``sum_t gates_gradient[t] (x) state[t - 1]``, a sum of outer products over time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.contributions import (
    Contribution,
    Dense,
    Saved,
    accumulation_dtype,
)
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.linear import project
from ownerwise.gradients.outer import Outer
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.recurrence import GRU, LSTM, RNN
from ownerwise.gradients.sources import Source, name_of

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["cell", "gru", "lstm", "rnn"]


def lstm(tape: Tape, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Rule of ``lstm``."""
    if isinstance(rest[0], Tensor):
        raise _packed(tape, func, rest)
    (first, first_cell), *others = rest
    output, states, cells = _layers(tape, func, input, (first, first_cell), *others)
    return output, states, cells


def gru(tape: Tape, func: Callable[..., Any], input: Tensor, *rest: Any) -> Any:
    """Rule of ``gru``."""
    if isinstance(rest[1], Tensor):
        raise _packed(tape, func, rest)
    first, *others = rest
    return _layers(tape, func, input, (first,), *others)[:2]


rnn = gru  # rnn_tanh and rnn_relu have the signature of gru


def _packed(tape: Tape, func: Callable[..., Any], rest: Sequence[Any]) -> Refused:
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
            out, last, last_cell = _direction(
                tape, func, hidden, start, weights, has_biases, backwards=direction == 1
            )
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
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[T, B, H]``, last state and last cell of one layer in one direction."""
    kind = name_of(func)
    weight, recurrent_weight = weights[:2]
    bias, recurrent_bias = weights[2:] if has_biases else (None, None)
    if backwards:
        input = input.flip(0)
    together = None if kind == "gru" or recurrent_bias is None else tape.value(recurrent_bias)
    projected = project(tape, functional.linear, input, weight, bias, None, together)
    stand_in, before = _recurrent_use(tape, func, projected, recurrent_weight, recurrent_bias)
    matrix = tape.value(recurrent_weight)
    last_cell = None
    if kind == "lstm":
        out, last_cell = LSTM.apply(projected, stand_in, firsts[0], firsts[1], matrix)  # type: ignore[misc]
    elif kind == "gru":
        out = GRU.apply(projected, stand_in, firsts[0], matrix, tape.value(recurrent_bias))
    else:
        out = RNN.apply(projected, stand_in, firsts[0], matrix, kind == "rnn_relu")
    assert isinstance(out, Tensor)
    before += [Saved(firsts[0], kind), Saved(out, kind)]
    last = out[-1]
    return (out.flip(0) if backwards else out), last, last_cell


def _recurrent_use(
    tape: Tape, func: Callable[..., Any], like: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Saved]]:
    """A stand-in for the recurrent part of the gates, tapped; the states are filled in later."""
    weight_source: Source | None = tape.source(weight)
    bias_source: Source | None = tape.source(bias)
    states: list[Saved] = []
    stand_in = torch.empty_strided(
        like.shape, (0,) * like.dim(), dtype=like.dtype, device=like.device
    )
    sources = [(s, None) for s in (weight_source, bias_source) if s is not None]
    if not sources:
        return stand_in, states
    policy = tape.policy

    def build(
        gradient: Tensor, layout: Layout, count: int
    ) -> Iterator[tuple[Source, Contribution]]:
        left = layout.records(gradient, count).reshape(count, -1, gradient.shape[-1])
        if bias_source is not None:
            yield bias_source, Dense(left.sum(dim=1, dtype=accumulation_dtype(left.dtype)))
        if weight_source is not None:
            first, out = (state.get() for state in states)
            before = torch.cat([first[None], out[:-1]])
            right = layout.records(before, count).reshape(count, left.shape[1], -1)
            yield weight_source, Outer(left, right, policy)

    return tape.tap(func, stand_in, sources, (1,), build), states


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
    state = hx[0] if isinstance(hx, list | tuple) else hx
    if tape.source(input) is not None or tape.source(state) is not None:
        return NotImplemented
    from_input = project(tape, functional.linear, input, w_ih, b_ih, None)
    from_state = project(tape, functional.linear, state, w_hh, b_hh, None)
    kind = name_of(func)
    if kind == "lstm_cell":
        i, f, g, o = (from_input + from_state).chunk(4, dim=-1)
        after = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * after.tanh(), after
    if kind == "gru_cell":
        r, z, n = from_input.chunk(3, dim=-1)
        r_state, z_state, n_state = from_state.chunk(3, dim=-1)
        n = (n + (r + r_state).sigmoid() * n_state).tanh()
        return torch.lerp(n, state, (z + z_state).sigmoid())
    total = from_input + from_state
    return total.relu() if kind == "rnn_relu_cell" else total.tanh()
