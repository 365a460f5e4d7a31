"""Activation checkpointing, compiled code and torch.vmap: exact, or refused with the remedy."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ownerwise as ow
from ownerwise.gradients import Refused, Tape, check
from tools import step_tools
from tools.record_loop import Model, assert_equal, assert_matches_loop, loop, run, wavy

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)
HALF = torch.bfloat16


def kept(module, *inputs):
    """A checkpoint: its activations are computed again in the backward pass."""
    return checkpoint(module, *inputs, use_reentrant=False)


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def encoder():
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 1, 1))


def tokens(x):
    return x[:, None, :] * torch.linspace(0.5, 1.5, 4, dtype=x.dtype)[:, None]


def positions(m, x):
    return kept(lambda h: (h + m.place).sin() * m.scale, tokens(x)).sum(1)


def tied(m, x):
    words = (x.abs() * 3).long().clamp(max=6)
    return kept(lambda ids: functional.embedding(ids, m.w).mean(1), words) @ m.w.t()


# what is checkpointed; each model maps [records, 6] to outputs that need gradients
MODELS = {
    "at the input": lambda: Model(lambda m, x: kept(m.block, x), block=perceptron()),
    "after a layer": lambda: Model(
        lambda m, x: m.head(kept(m.block, m.first(x))),
        first=nn.Linear(6, 6), block=perceptron(), head=nn.Linear(6, 3),
    ),
    "twice": lambda: Model(lambda m, x: kept(m.block, kept(m.block, x)), block=perceptron()),
    "nested": lambda: Model(
        lambda m, x: kept(lambda h: m.outer(kept(m.inner, h)).sin(), x),
        outer=nn.Linear(6, 6), inner=perceptron(),
    ),
    "attention": lambda: Model(lambda m, x: kept(m.block, tokens(x)).sum(1), block=encoder()),
    "lstm": lambda: Model(
        lambda m, x: kept(lambda h: m.lstm(h)[0], tokens(x)).sum(1),
        lstm=nn.LSTM(6, 3, batch_first=True),
    ),
    "gru": lambda: Model(
        lambda m, x: kept(lambda h: m.gru(h)[0], tokens(x)).sum(1),
        gru=nn.GRU(6, 3, batch_first=True),
    ),
    "convolution": lambda: Model(
        lambda m, x: kept(m.block, x.reshape(-1, 1, 2, 3)).flatten(1), block=convolutions()
    ),
    "derived weight": lambda: Model(
        lambda m, x: kept(m.block, x),
        block=nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh()),
    ),
    "derived outside": lambda: Model(
        lambda m, x: kept(lambda h, w: functional.linear(h, w).sin(), x, m.w - m.w.mean()),
        w=torch.randn(3, 6),
    ),
    "pointwise": lambda: Model(positions, place=torch.randn(4, 6), scale=torch.randn(6)),
    "tied": lambda: Model(tied, w=torch.randn(7, 6)),
    "without a rule": lambda: Model(
        lambda m, x: kept(lambda h: torch.einsum("bi,ij->bj", h, m.w).sin(), x),
        w=torch.randn(6, 3),
    ),
    "unchecked": lambda: Model(
        lambda m, x: checkpoint(m.block, x, use_reentrant=False, determinism_check="none"),
        block=perceptron(),
    ),
    "without early stop": lambda: Model(
        lambda m, x: checkpoint(m.block, x, use_reentrant=False, early_stop=False),
        block=perceptron(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_exact(name):
    """Pitfall 19: against one record at a time through autograd, in float64."""
    model = MODELS[name]()
    x = torch.randn(5, 6)
    assert check(model, x) == []
    assert_matches_loop(model, x)
    assert all(p.grad is None for p in model.parameters())


def without_checkpoints(monkeypatch):
    monkeypatch.setattr(f"{__name__}.checkpoint", lambda f, *x, **_: f(*x))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_checkpoints_change_no_bit(autocast, half, dropout, monkeypatch):
    """In bfloat16 and with random layers too, whose masks must be the same ones again."""
    block = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(dropout), nn.Linear(9, 6))
    model = Model(
        lambda m, x: m.head(kept(m.block, m.first(x))),
        first=nn.Linear(6, 6), block=block, head=nn.Linear(6, 3),
    ).to(HALF if half else torch.float32)  # fmt: skip
    x = torch.randn(9, 6).to(HALF if half else torch.float32)

    def found():
        tape = Tape(model)
        torch.manual_seed(4)
        with torch.autocast("cpu", HALF, enabled=autocast), tape:
            outputs = model(x)
        records = tape.backward(wavy(outputs.float()))
        return [records.norms, *records.weighted_sum(torch.linspace(0, 1, 9)).values()]

    recomputed = found()
    without_checkpoints(monkeypatch)
    for one, other in zip(recomputed, found(), strict=True):
        assert one.dtype in (torch.float32, torch.float64)
        assert torch.equal(one, other)


@pytest.mark.parametrize("micro_batch_size", [None, 4])
@pytest.mark.parametrize("weights", [None, step_tools.ByRank()])
def test_a_step_through_checkpoints_equals_the_loop(micro_batch_size, weights, monkeypatch):
    model = MODELS["after a layer"]()
    step = step_tools.make_step(
        model,
        functional.cross_entropy,
        weights=weights,
        performance=ow.Performance(micro_batch_size=micro_batch_size),
    )
    batch = step_tools.batch_of(3 * torch.randn(11, 6), torch.randint(0, 3, (11,)))
    sums = step_tools.flat(step.clipped_sum(batch))
    without_checkpoints(monkeypatch)
    if weights is None:
        expected = step_tools.loop_over_records(model, functional.cross_entropy, batch, step)
        expected = torch.cat([total.flatten() for total in expected])
    else:
        expected = step_tools.flat(step.clipped_sum(batch))
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("first", [False, True])
def test_reentrant_checkpoints_are_refused_with_the_remedy(first):
    """Torch itself would train the block without clipping, or not at all at the input."""
    model = Model(
        lambda m, x: checkpoint(m.block, x if first else m.first(x), use_reentrant=True),
        first=nn.Linear(6, 6), block=perceptron(),
    )  # fmt: skip
    x = torch.randn(5, 6)
    with pytest.raises(Refused, match="use_reentrant=True") as caught:
        run(Tape(model), x)
    assert "use_reentrant=False" in caught.value.problem.remedy
    assert any("use_reentrant=False" in problem.remedy for problem in check(model, x))
    assert all(p.grad is None for p in model.parameters())


def test_parameters_that_are_read_without_gradients_are_not_taken_for_a_checkpoint():
    def forward(m, x):
        with torch.no_grad():
            target = m.layer(x)
        return m.layer(x) - target.cos()

    assert_matches_loop(Model(forward, layer=nn.Linear(6, 3)), torch.randn(5, 6))


def compiled_function(module):
    function = torch.compile(lambda m, x: m.block(x).sin(), backend="eager", fullgraph=True)
    return Model(function, block=module)


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def compiled_inside(module):
    return nn.Sequential(torch.compile(module, backend="eager"), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: torch.compile(module, backend="eager"),
        compiled_in_place,
        compiled_inside,
        compiled_function,
    ],
)
def test_compiled_models_are_exact_because_they_run_as_ordinary_python(wrap):
    """Pitfall 19: compiled code would hide the calls on parameters."""
    model, x = wrap(perceptron()), torch.randn(5, 6)
    with torch.compiler.set_stance("force_eager"):
        expected = loop(model, x)
    calls = []

    class Counts(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    assert check(model, x) == []
    with Counts():  # sees no call inside compiled code
        assert_equal(run(Tape(model), x), expected)
    assert functional.linear in calls


def test_a_compiled_model_takes_private_steps():
    model = torch.compile(perceptron(), backend="eager")
    step = step_tools.make_step(model, functional.cross_entropy)
    batch = step_tools.batch_of(3 * torch.randn(11, 6), torch.randint(0, 6, (11,)))
    sums = step_tools.flat(step.clipped_sum(batch))
    with torch.compiler.set_stance("force_eager"):
        totals = step_tools.loop_over_records(model, functional.cross_entropy, batch, step)
    expected = torch.cat([total.flatten() for total in totals])
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-9)


def test_layers_inside_vmap_are_refused_and_other_calls_are_not():
    layer = nn.Linear(6, 3)
    model = Model(lambda m, x: torch.vmap(m.layer)(x), layer=layer)
    with pytest.raises(Refused, match=r"inside torch.vmap.*Remedy: call the layer on the whole"):
        run(Tape(model), torch.randn(5, 6))
    assert "torch.vmap" in str(check(model, torch.randn(5, 6))[0])
    free = Model(lambda m, x: torch.vmap(torch.sin)(m.layer(x)), layer=layer)
    assert_matches_loop(free, torch.randn(5, 6))


COMPANY = [torch.zeros, lambda *n: torch.full(n, 1e4), lambda *n: torch.full(n, torch.nan)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e4, 1e15])
def test_a_record_is_clipped_the_same_in_any_company(autocast, scale):
    """Huge, vanishing and non-finite neighbours change no bit; another place, the last ones."""
    model = MODELS["after a layer"]().float()
    record = scale * torch.randn(1, 6).float()
    found = []
    for place, company in [(3, company) for company in COMPANY] + [(0, COMPANY[2])]:
        others = company(7, 6).float()
        tape = Tape(model)
        with torch.autocast("cpu", HALF, enabled=autocast), tape:
            outputs = model(torch.cat([others[:place], record, others[place:]]))
        records = tape.backward(outputs.float().square().sum(dim=1))
        norm = float(records.norms[place])
        factors = torch.zeros(8)
        factors[place] = 1 / norm if norm < torch.inf else 1.0
        total = step_tools.flat(records.weighted_sum(factors))
        assert float(total.norm()) == pytest.approx(float(norm < torch.inf), rel=1e-5)
        found.append((norm, total))
    norms, totals = zip(*found, strict=True)
    assert len(set(norms[:3])) == 1
    assert all(torch.equal(total, totals[0]) for total in totals[:3])
    assert norms[3] == pytest.approx(norms[0], rel=1e-5)
    torch.testing.assert_close(totals[3], totals[0], rtol=1e-4, atol=1e-5)
