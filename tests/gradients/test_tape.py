"""Precision, odd batches, and that the model is left as it was."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from ownerwise.gradients import Refused, Tape
from ownerwise.gradients.taps import Tap
from tools.record_loop import Model, assert_equal, loop, norms_of, run, wavy


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Pitfall 22: norms and sums in float32, beyond what half precision can hold."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    x = torch.randn(6, 64, dtype=dtype) * 4
    tape = Tape(model)
    with tape:
        outputs = model(x)
    records = tape.backward(outputs.float().sum(dim=1) * 200)
    assert records.norms.dtype == torch.float32
    assert records.norms.isfinite().all()
    assert (records.norms > 400).all()
    sums = records.weighted_sum(torch.ones(6) * 50)
    assert all(g.dtype == torch.float32 for g in sums.values())
    assert all(g.isfinite().all() for g in sums.values())
    formed = records.per_record()
    expected = norms_of({p: g.double() for p, g in formed.items()})
    torch.testing.assert_close(records.norms.double(), expected, rtol=1e-5, atol=0)
    assert (expected.square() > 65504).any()  # what float16 cannot hold


@pytest.mark.parametrize(
    "model",
    [
        small_cnn(),
        nn.Sequential(nn.Flatten(2), nn.Linear(36, 8), nn.LayerNorm(8), nn.RMSNorm(8)),
    ],
    ids=["cnn", "norms"],
)
def test_bfloat16_agrees_with_double(model):
    x = torch.randn(4, 2, 6, 6)
    double = norms_of(loop(copy.deepcopy(model).double(), x.double()))
    half = copy.deepcopy(model).to(torch.bfloat16)
    records = run(Tape(half), x.to(torch.bfloat16))
    assert records.norms.dtype == torch.float32
    torch.testing.assert_close(records.norms.double(), double, rtol=0.2, atol=0)


def test_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).float()
    x = torch.randn(4, 8, dtype=torch.float32)
    tape = Tape(model)
    with torch.autocast("cpu", torch.bfloat16):
        with tape:
            outputs = model(x)
        losses = wavy(outputs.float())
    records = tape.backward(losses)
    expected = norms_of(loop(copy.deepcopy(model).double(), x.double()))
    torch.testing.assert_close(records.norms.double(), expected, rtol=0.1, atol=0)


def test_float32_norms_do_not_understate():
    """Pitfall 20: a sum clipped by these norms is within 1e-6 of the bound."""
    model = small_cnn().float()
    x = torch.randn(64, 2, 6, 6, dtype=torch.float32) * 3
    records = run(Tape(model), x)
    exact = norms_of(loop(copy.deepcopy(model).double(), x.double()))
    assert ((exact / records.norms.double()) < 1 + 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"lean": True}], ids=["fast", "lean"])
def test_non_finite_record(bad, options):
    """Pitfall 21: it contributes exactly zero, and the others are as if it were not there."""

    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = small_cnn()
            self.scale = nn.Parameter(torch.randn(5))
            self.tied = nn.Linear(5, 5)
            self.act = nn.PReLU()
            self.rnn = nn.GRU(5, 5, batch_first=True)

        def forward(self, x):
            h = self.tied(self.tied(self.cnn(x))) * self.scale
            return self.rnn(self.act(h).unsqueeze(1))[0]

    model = Everything()
    x = torch.randn(5, 2, 6, 6)
    x[2, 0, 1, 1] = bad
    keep = [0, 1, 3, 4]
    tape = Tape(model, **options)
    for _ in range(2):
        records = run(tape, x)
        assert not records.norms[2].isfinite()
        expected = loop(model, x[keep])
        torch.testing.assert_close(records.norms[keep], norms_of(expected))
        for factor in (0.0, 0.7):
            sums = records.weighted_sum(
                torch.full((5,), 0.7).index_fill(0, torch.tensor(2), factor)
            )
            for parameter, gradients in expected.items():
                torch.testing.assert_close(sums[parameter], 0.7 * gradients.sum(dim=0))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (small_cnn(), (2, 6, 6)),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LayerNorm(4)), (3,)),
        (nn.Sequential(nn.Flatten(1), nn.Linear(4, 2)), (2, 2)),
    ],
    ids=["cnn", "mlp", "flat"],
)
def test_empty_batch(model, shape):
    """Pitfall 7: zero sums for every parameter, no crash."""
    tape = Tape(model.double())
    with tape:
        outputs = model(torch.zeros(0, *shape))
    records = tape.backward(outputs.flatten(1).sum(dim=1))
    assert records.norms.shape == (0,)
    sums = records.weighted_sum(torch.zeros(0))
    assert set(sums) == set(model.parameters())
    assert all(not g.any() and g.shape == p.shape for p, g in sums.items())


def test_batches_of_changing_size():
    """A batch as large as another dimension reads as it did before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tape = Tape(model)
    for count in (5, 1, 4, 2, 4, 7):
        x = torch.randn(count, 4, 3)
        assert_equal(run(tape, x), loop(model, x))


@pytest.mark.parametrize("options", [{}, {"lean": True}], ids=["fast", "lean"])
def test_records_of_two_batches_at_once(options):
    """Micro-batches: memory used again by the second must not be the first one's."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = small_cnn()
            self.rnn = nn.LSTM(5, 4, batch_first=True)
            self.wide = nn.Linear(4, 3)

        def forward(self, x):
            h = self.cnn(x)[:, None].expand(-1, 30, -1)
            return self.wide(self.rnn(h)[0])

    model = Both()
    tape = Tape(model, **options)
    batches = [torch.randn(4, 2, 6, 6) for _ in range(3)]
    held = [run(tape, x) for x in batches]
    for x, records in zip(batches, held, strict=True):
        assert_equal(records, loop(model, x))
    formed = run(tape, batches[0]).per_record()
    run(tape, batches[1])
    for parameter, gradients in loop(model, batches[0]).items():
        torch.testing.assert_close(formed[parameter], gradients, rtol=1e-9, atol=1e-9)


def test_dead_start():
    """A zero head hides all layouts behind zero gradients; the next step looks again."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.init.zeros_(model[2].weight)
    tape = Tape(model)
    x = torch.randn(4, 4, 3)
    assert_equal(run(tape, x), loop(model, x))
    nn.init.normal_(model[2].weight)
    assert_equal(run(tape, x), loop(model, x))


def test_model_is_left_untouched():
    model = small_cnn()
    attributes = {id(m): set(vars(m)) for m in model.modules()}
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 2, 6, 6)
    plain = model(x)
    tape = Tape(model)
    records = run(tape, x)
    records.weighted_sum(torch.ones(4))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    for module in model.modules():
        assert set(vars(module)) == attributes[id(module)]
        hooks = [v for k, v in vars(module).items() if "hooks" in k]
        assert not any(hooks)
    for parameter in model.parameters():
        assert parameter.grad is None
        assert not parameter._backward_hooks
        assert not vars(parameter)
        assert type(parameter) is nn.Parameter
        assert parameter.is_contiguous()
    assert torch.equal(model(x), plain)
    assert pickle.dumps(model)


def test_gradients_held_by_the_user_stay():
    model = nn.Linear(3, 2)
    held = torch.ones(2, 3)
    model.weight.grad = held
    run(Tape(model), torch.randn(4, 3))
    assert model.weight.grad is held
    assert torch.equal(held, torch.ones(2, 3))


def test_random_stream_is_not_shifted():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.randn(4, 3)
    torch.manual_seed(3)
    model(x)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run(Tape(model), x)
    assert torch.equal(torch.rand(3), expected)


def test_training_with_groups_and_momentum():
    """With all factors 1 the sums are the gradients of the plain step."""
    model = small_cnn()
    twin = copy.deepcopy(model)
    x, y = torch.randn(6, 2, 6, 6), torch.randint(0, 5, (6,))
    steps = []
    for net in (model, twin):
        weights = [p for n, p in net.named_parameters() if "weight" in n]
        biases = [p for n, p in net.named_parameters() if "bias" in n]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
        steps.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    tape = Tape(model)
    for _ in range(3):
        with tape:
            outputs = model(x)
        records = tape.backward(functional.cross_entropy(outputs, y, reduction="none"))
        for parameter, gradient in records.weighted_sum(torch.ones(6) / 6).items():
            parameter.grad = gradient
        steps[0].step()
        steps[1].zero_grad()
        functional.cross_entropy(twin(x), y).backward()
        steps[1].step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_exception_in_the_model_leaves_a_usable_tape():
    model = nn.Linear(3, 2)
    tape = Tape(model)
    with pytest.raises(RuntimeError, match="shapes"), tape:
        model(torch.randn(4, 5))
    x = torch.randn(4, 3)
    assert_equal(run(tape, x), loop(model, x))


def test_refusals_can_be_pickled():
    refusal = pickle.loads(pickle.dumps(Refused("here", "wrong", "right")))
    assert str(refusal) == "here: wrong. Remedy: right"


class Sequence(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        found = self.layer(x) if not isinstance(self.layer, nn.MultiheadAttention) else None
        outputs = found if isinstance(found, torch.Tensor) else (found or self.layer(x, x, x))[0]
        return self.head(outputs).mean(dim=1)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 4, batch_first=True),
        nn.LSTM(4, 2, num_layers=2, bidirectional=True, batch_first=True),
        nn.GRU(4, 4, batch_first=True),
        nn.RNN(4, 4, batch_first=True),
        nn.MultiheadAttention(4, 2, batch_first=True),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.Conv1d(3, 3, 3, padding=1),
        nn.LayerNorm(4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        nn.PReLU(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_nothing_of_a_pass_stays_in_memory(layer):
    """A tap that can be reached from its own graph is a cycle that no collector sees."""
    gc.collect()
    before = sum(type(thing) is Tap for thing in gc.get_objects())
    run(Tape(Sequence(layer).double()), torch.randn(5, 3, 4)).weighted_sum(torch.ones(5))
    gc.collect()
    assert sum(type(thing) is Tap for thing in gc.get_objects()) == before


def test_records_are_told_from_time_steps_where_few_have_a_gradient():
    """As many time steps as records, time first, and one record with a loss, whichever it is."""
    torch.manual_seed(0)
    model = Model(lambda m, x: m.layer(x.transpose(0, 1)).sum(0), layer=nn.Linear(6, 3).double())
    x = torch.randn(8, 8, 6, dtype=torch.float64)
    for chosen in range(8):
        only = torch.zeros(8, dtype=torch.float64)
        only[chosen] = 1

        def loss(outputs, only=only):
            return wavy(outputs) * only[: len(outputs)]

        tape = Tape(model)
        expected = norms_of(loop(model, x)) * only
        torch.testing.assert_close(run(tape, x, loss).norms, expected)
