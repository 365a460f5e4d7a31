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

from ownerwise.gradients.contributions import Contribution, Dense, Saved, accumulation_dtype
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.linear import project
from ownerwise.gradients.outer import Outer, SharedLeft
from ownerwise.gradients.pointwise import as_single_record
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.recurrence import GRU, LSTM, RNN
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
    kind = name_of(func)
    order = range(len(input))[::-1] if backwards else range(len(input))
    weight, recurrent_weight, *biases = weights
    bias, recurrent_bias = biases or (None, None)
    matrix, recurrent_matrix = tape.value(weight), tape.value(recurrent_weight)
    use = _Use(tape, recurrent_weight, recurrent_bias)
    shape = (*input.shape[:2], len(matrix))
    stand_in = torch.empty_strided(shape, (0, 0, 0), dtype=input.dtype, device=input.device)
    last_cell = None
    if kind == "gru":
        stand_in = _tap(tape, func, stand_in, [use])
        projected = project(tape, functional.linear, input, weight, bias, None)
        out = GRU.apply(
            projected, stand_in, *firsts, recurrent_matrix, tape.value(recurrent_bias), order
        )
    else:  # both parts of the gates have the same gradient: one tap serves all weights
        input = input.contiguous()
        loan = tape.policy.workspace.loan(shape, input) if kind == "lstm" else None
        uses = [use, _Use(tape, weight, bias, Saved(input, kind))]
        stand_in = _tap(tape, func, stand_in, uses, loan)
        total = tape.value(bias) + tape.value(recurrent_bias) if biases else None
        arguments = (input, stand_in, *firsts, matrix, recurrent_matrix, total)
        if kind == "lstm":
            out, last_cell = LSTM.apply(*arguments, order, loan, tape.in_last_pass)  # type: ignore[misc]
        else:
            out = RNN.apply(*arguments, kind == "rnn_relu", order)
    assert isinstance(out, Tensor)
    use.follow(Saved(firsts[0], kind), Saved(out, kind), backwards)
    return out, out[order[-1]], last_cell


class _Use:
    """A matrix and a bias that add to the gates, and what the matrix is applied to."""

    def __init__(
        self, tape: Tape, weight: Tensor, bias: Tensor | None, inputs: Saved | None = None
    ) -> None:
        self.weight: Source | None = tape.source(weight)
        self.bias: Source | None = tape.source(bias)
        self.inputs = inputs
        self.first: Saved | None = None
        self.backwards = False

    def follow(self, first: Saved, states: Saved, backwards: bool) -> None:
        """The matrix is applied to the state of the step before."""
        self.first, self.inputs, self.backwards = first, states, backwards

    def right(self) -> Tensor:
        """``[T, B, columns]``."""
        assert self.inputs is not None
        if self.first is None:
            return self.inputs.get()
        first, states = self.first.get()[None], self.inputs.get()
        if self.backwards:
            return torch.cat([states[1:], first])
        return torch.cat([first, states[:-1]])


def _tap(
    tape: Tape,
    func: Callable[..., Any],
    stand_in: Tensor,
    uses: list[_Use],
    loan: Loan | None = None,
) -> Tensor:
    """Tap the stand-in for the recurrent part of the gates, whose gradient is in ``loan``."""
    sources = [(s, None) for use in uses for s in (use.weight, use.bias) if s is not None]
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
                right = use.right().transpose(0, 1)
                yield use.weight, Outer(left, right, policy, shared)

    return tape.tap(func, stand_in, sources, (1,), build)


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
    state = states[0]
    from_input = project(tape, functional.linear, input, w_ih, b_ih, None)
    from_state = project(tape, functional.linear, state, w_hh, b_hh, None)
    kind = name_of(func)
    if kind == "lstm_cell":
        i, f, g, o = (from_input + from_state).chunk(4, dim=-1)
        after = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * after.tanh(), after
    if kind == "gru_cell":
        r, z, n = from_input.chunk(3, dim=-1)
        r_state, z_state, n_state = from_state.chunk(3, dim=-1)
        n = (n + (r + r_state).sigmoid() * n_state).tanh()
        return torch.lerp(n, state, (z + z_state).sigmoid())
    total = from_input + from_state
    return total.relu() if kind == "rnn_relu_cell" else total.tanh()
