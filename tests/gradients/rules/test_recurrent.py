"""Recurrent layers and cells against the loop over records, at random shapes and options."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ownerwise.gradients import Tape
from tools.record_loop import COUNT, FEW, Model, assert_matches_loop, loop, wavy

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
BOTH_WAYS = {"num_layers": 2, "bidirectional": True, "bias": True, "batch_first": True}


class Recurrent(nn.Module):
    """Outputs and last states count; ``start``: of zeros, of the data, or learned."""

    def __init__(self, kind, start="zeros", **options):
        super().__init__()
        self.layer = layer = kind(3, options.pop("hidden_size", 4), **options)
        self.directions = 2 if layer.bidirectional else 1
        self.head = nn.Linear(self.directions * layer.hidden_size, 2)
        self.start = start
        if start == "learned":
            shape = (self.directions * layer.num_layers, 1, layer.hidden_size)
            self.first = nn.ParameterList(torch.randn(shape) for _ in range(2))

    def first_states(self, x):
        count = len(x)
        if self.start == "zeros":
            return None
        if self.start == "learned":
            states = [first.expand(-1, count, -1) for first in self.first]
        else:
            shape = (self.directions * self.layer.num_layers, count, self.layer.hidden_size)
            states = [value.expand(shape) for value in (x.sum(dim=(1, 2))[:, None], x[:, 0, :1])]
        return tuple(states) if isinstance(self.layer, nn.LSTM) else states[0]

    def forward(self, x):
        turned = not self.layer.batch_first
        outputs, last = self.layer(x.transpose(0, 1) if turned else x, self.first_states(x))
        outputs = outputs.transpose(0, 1) if turned else outputs
        states = last if isinstance(last, tuple) else (last,)
        ends = [state.transpose(0, 1).flatten(1) for state in states]
        return torch.cat([self.head(outputs).flatten(1), *ends], dim=1)


OPTIONS = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 4),
        "num_layers": st.integers(1, 3),
        "bidirectional": st.booleans(),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
        "start": st.sampled_from(["zeros", "data", "learned"]),
    }
)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(COUNT, st.integers(1, 5), OPTIONS)
@example(4, 4, BOTH_WAYS)  # as many steps as records
@example(4, 4, {**BOTH_WAYS, "batch_first": False})
@example(3, 5, {**BOTH_WAYS, "bias": False})
@example(1, 2, {**BOTH_WAYS, "start": "learned"})
def test_recurrent(kind, count, length, options):
    assert_matches_loop(Recurrent(kind, **options), torch.randn(count, length, 3))


@FEW
@given(COUNT, st.integers(1, 5), OPTIONS)
@example(4, 4, BOTH_WAYS)
def test_projected_lstm(count, length, options):
    options = {**options, "start": "zeros", "hidden_size": options.get("hidden_size", 3) + 1}
    assert_matches_loop(Projected(**options), torch.randn(count, length, 3))


class Projected(nn.Module):
    def __init__(self, start="zeros", **options):
        super().__init__()
        self.layer = nn.LSTM(3, proj_size=options["hidden_size"] - 1 or 1, **options)

    def forward(self, x):
        outputs, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        ends = [state.transpose(0, 1).flatten(1) for state in last]
        return torch.cat([outputs.flatten(1), *ends], dim=1)


class Packed(nn.Module):
    """The first column of the input is each record's length."""

    def __init__(self, kind, is_sorted=False, given=False, **options):
        super().__init__()
        self.layer = kind(3, 4, **options)
        self.is_sorted = is_sorted
        self.given = given

    def forward(self, x):
        lengths, x = x[:, 0, 0].long().clamp_min(1), x[..., 1:]
        inputs = x if self.layer.batch_first else x.transpose(0, 1)
        options = {"batch_first": self.layer.batch_first}
        packed = pack_padded_sequence(inputs, lengths, enforce_sorted=self.is_sorted, **options)
        outputs, last = self.layer(packed, self.first(x))
        outputs, _ = pad_packed_sequence(outputs, total_length=x.shape[1], **options)
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        ends = [state.transpose(0, 1).flatten(1) for state in ends]
        return torch.cat([outputs.flatten(1), *ends], dim=1)

    def first(self, x):
        if not self.given:
            return None
        layers = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        states = [
            value.expand(layers, len(x), 4) for value in (x.sum(dim=(1, 2))[:, None], x[:, 0, :1])
        ]
        return tuple(states) if isinstance(self.layer, nn.LSTM) else states[0]


PACKED = [
    {},
    {"given": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "given": True, "bias": False},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", PACKED, ids=range(len(PACKED)))
@pytest.mark.parametrize("lengths", [[2, 5, 1, 3], [5, 4, 2, 1], [3, 3, 3, 3], [4]])
def test_packed_sequences(kind, options, lengths):
    x = torch.randn(len(lengths), max(lengths), 4)
    x[:, 0, 0] = torch.tensor(lengths)
    models = [Packed(kind, **options)]
    if lengths == sorted(lengths, reverse=True):
        models.append(Packed(kind, is_sorted=True, **options))
    for model in models:
        assert_matches_loop(model, x)
        with Tape(model):
            ours = model(x)
        torch.testing.assert_close(ours, model(x), rtol=1e-12, atol=1e-12)


def test_packed_projected_lstm():
    model = Packed(nn.LSTM, proj_size=2, num_layers=2, batch_first=True)
    x = torch.randn(3, 4, 4)
    x[:, 0, 0] = torch.tensor([2, 4, 1])
    assert_matches_loop(model, x)


SELECTIONS = {
    "features": lambda x: x.index_select(2, torch.tensor([2, 0, 1])),
    "time": lambda x: x.index_select(1, torch.tensor([3, 1, 0, 2])),
    "two of each": lambda x: x.index_select(0, torch.arange(len(x)).repeat_interleave(2)),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_selection_before_packing_is_not_taken_for_an_order(select, count):
    def forward(m, x):
        chosen = select(x)
        packed = pack_padded_sequence(chosen, torch.full((len(chosen),), 4), batch_first=True)
        return m.layer(packed)[1][0][0].unflatten(0, (len(x), -1)).sum(1)

    model = Model(forward, layer=nn.LSTM(3, 2, batch_first=True))
    assert_matches_loop(model, torch.randn(count, 4, 3))


@pytest.mark.parametrize("count", [1, 3])
def test_packed_sequences_from_a_learned_state(count):
    def forward(m, x):
        lengths = x[:, 0, 0].long()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.layer(packed, m.state.expand(-1, len(x), -1).contiguous())[1][0]

    model = Model(forward, layer=nn.GRU(3, 2, batch_first=True), state=torch.randn(1, 1, 2))
    x = torch.randn(count, 4, 3)
    x[:, 0, 0] = torch.tensor([2, 4, 1])[:count]
    assert_matches_loop(model, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("minor", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_sequences_for_each_record(kind, minor, count):
    """As for the sentences of a document."""

    def forward(m, x):
        sequences = x.unflatten(1, (2, 3))
        sequences = (sequences.transpose(0, 1) if minor else sequences).flatten(0, 1)
        hidden = m.layer(sequences)[0][:, -1]
        hidden = hidden.unflatten(0, (2, -1) if minor else (-1, 2))
        return hidden.tanh().sum(0 if minor else 1)

    model = Model(forward, layer=kind(3, 2, batch_first=True))
    assert_matches_loop(model, torch.randn(count, 6, 3))


@FEW
@given(COUNT, st.integers(1, 5), OPTIONS)
def test_recurrent_with_relu(count, length, options):
    model = Recurrent(nn.RNN, nonlinearity="relu", **options)
    assert_matches_loop(model, torch.randn(count, length, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["zeros", "data"])
def test_recurrent_values_are_torchs(kind, start):
    model = Recurrent(kind, start, **BOTH_WAYS)
    x = torch.randn(3, 5, 3)
    with Tape(model):
        ours = model(x)
    torch.testing.assert_close(ours, model(x), rtol=1e-12, atol=1e-12)


def test_recurrent_dropout_keeps_the_scale():
    model = nn.LSTM(3, 64, num_layers=2, dropout=0.5)
    with Tape(model):
        outputs, _ = model(torch.randn(5, 4, 3))
    assert outputs.isfinite().all()


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@FEW
@given(COUNT, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_recurrent_cells(kind, count, length, width, bias, learned):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(3, width, bias=bias)
            self.first = nn.Parameter(torch.randn(1, width)) if learned else None

        def forward(self, x):
            state = self.first.expand(len(x), -1) if learned else None
            if learned and kind is nn.LSTMCell:
                state = (state, state.cos())
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return torch.cat(state, dim=1) if isinstance(state, tuple) else state

    assert_matches_loop(Steps(), torch.randn(count, length, 3))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_an_initial_state_changed_in_place_is_refused(kind):
    model = kind(3, 4, batch_first=True)
    state = torch.randn(1, 5, 4)
    tape = Tape(model)
    with tape:
        outputs, _ = model(
            torch.randn(5, 2, 3), (state, state.clone()) if kind is nn.LSTM else state
        )
    state.mul_(2)
    with pytest.raises(RuntimeError, match=r"in place|inplace"):  # by autograd, or by the tape
        tape.backward(outputs.square().sum(dim=(1, 2)))


@pytest.mark.parametrize("after", [True, False], ids=["after a layer", "first"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_under_autocast(kind, bias, after):
    """A layer before it returns bfloat16, which its own weights do not have."""

    def forward(m, x):
        x = m.before(x) if after else x
        if isinstance(m.layer, nn.RNNCellBase):
            state = m.layer(x[:, 1], m.layer(x[:, 0]))
            return state[0] if isinstance(state, tuple) else state
        return m.layer(x)[0][:, -1]

    options = {} if issubclass(kind, nn.RNNCellBase) else {"batch_first": True}
    model = Model(forward, before=nn.Linear(3, 3), layer=kind(3, 4, bias=bias, **options)).float()
    x = torch.randn(3, 2, 3).float()
    expected, tape = loop(model, x), Tape(model)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x).float()
        with tape:
            outputs = model(x)
        assert outputs.dtype == (torch.bfloat16 if after else torch.float32)
        gradients = tape.backward(wavy(outputs.float()))
    torch.testing.assert_close(outputs.float(), theirs, rtol=0.03, atol=0.03)
    for parameter, formed in gradients.per_record().items():
        near = 0.05 * float(expected[parameter].abs().max())
        torch.testing.assert_close(formed, expected[parameter], rtol=0.05, atol=near)
