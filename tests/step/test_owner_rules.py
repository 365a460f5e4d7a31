"""Every layer rule under both mechanisms for owners, against a loop that uses autograd alone."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

import ownerwise as ow
from ownerwise.batches import Batch
from ownerwise.gradients import tape
from ownerwise.gradients.rules import RULES
from tools.record_loop import Model
from tools.step_tools import double_on_one_thread, flat, make_step

_double = pytest.fixture(autouse=True)(double_on_one_thread)

SIZES = np.array([1, 3, 0, 7, 2, 50, 1, 4, 12])
EQUAL = np.where(SIZES > 0, 4, 0)


def _tied(m, x):
    return m.table(x).mean(dim=1).tanh() @ m.table.weight.T @ m.out


def _weight_norm(m, x):
    return functional.linear(x, m.weight / m.weight.norm(dim=1, keepdim=True)) * m.scale


def _sequence(kind, **options):
    return lambda: Model(
        lambda m, x: m.head(m.layer(x)[0].mean(dim=1)),
        layer=kind(4, 5, batch_first=True, **options),
        head=nn.Linear(10 if options.get("bidirectional") else 5, 3),
    )


def _cell(kind):
    def forward(m, x):
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return lambda: Model(forward, cell=kind(4, 5), head=nn.Linear(5, 3))


def _patches(m, x):
    windows = x.as_strided((len(x), 4, 3, 4), (x.stride(0), 4, 4, 1))
    return windows.view(len(x), 4, 12) @ m.weight


def _packed(m, x):
    lengths = 1 + (100 * x[:, 0, 0]).abs().long() % x.shape[1]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.head(m.layer(packed)[1][-1])


FLAT, SEQUENCE, IMAGE, TOKENS = (4,), (6, 4), (4, 6, 6), None

# Model, and the shape of a record's input (None for token numbers).
MODELS = {
    "chain": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), FLAT),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), FLAT),
    "linear on sequences": (
        lambda: Model(lambda m, x: m.layer(x).tanh().mean(dim=1), layer=nn.Linear(4, 3)),
        SEQUENCE,
    ),
    "matmul": (
        lambda: Model(
            lambda m, x: torch.mm((x @ m.a).tanh(), m.b), a=torch.randn(4, 5), b=torch.randn(5, 3)
        ),
        FLAT,
    ),
    "addmm": (
        lambda: Model(
            lambda m, x: torch.addmm(m.offset, x.tanh(), m.matrix),
            matrix=torch.randn(4, 3),
            offset=torch.randn(3),
        ),
        FLAT,
    ),
    **{
        f"convolution {name}": (
            functools.partial(
                lambda groups, stride: nn.Sequential(
                    nn.Conv2d(4, 6, 3, stride=stride, padding=1, groups=groups),
                    nn.ReLU(inplace=True), nn.Conv2d(6, 3, 2), nn.Flatten(), nn.LazyLinear(3),
                ),
                groups, stride,
            ),
            IMAGE,
        )
        for name, groups, stride in (("", 1, 1), ("in groups", 2, 2))
    },
    "convolution in one dimension": (
        lambda: nn.Sequential(nn.Conv1d(6, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
        SEQUENCE,
    ),
    "embedding": (
        lambda: Model(
            lambda m, x: m.head(m.table(x).tanh().mean(dim=1)),
            table=nn.Embedding(11, 4), head=nn.Linear(4, 3),
        ),
        TOKENS,
    ),
    "bags": (
        lambda: Model(
            lambda m, x: m.head(m.table(x).tanh()),
            table=nn.EmbeddingBag(11, 4), head=nn.Linear(4, 3),
        ),
        TOKENS,
    ),
    "tied weights": (
        lambda: Model(_tied, table=nn.Embedding(11, 4), out=torch.randn(11, 3)), TOKENS
    ),
    "a layer used twice": (
        lambda: Model(
            lambda m, x: m.out(m.layer(m.layer(x).tanh())),
            layer=nn.Linear(4, 4), out=nn.Linear(4, 3),
        ),
        FLAT,
    ),
    "normalisation": (
        lambda: nn.Sequential(
            nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4, affine=False),
            nn.Flatten(), nn.LayerNorm(144), nn.RMSNorm(144), nn.Linear(144, 3),
        ).eval(),
        IMAGE,
    ),
    "attention": (
        lambda: Model(
            lambda m, x: m.head(m.layer(x, x, x)[0].mean(dim=1)),
            layer=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3),
        ),
        SEQUENCE,
    ),
    "lstm": (_sequence(nn.LSTM, num_layers=2, bidirectional=True), SEQUENCE),
    "gru": (_sequence(nn.GRU), SEQUENCE),
    "rnn": (_sequence(nn.RNN), SEQUENCE),
    "packed sequences": (
        lambda: Model(_packed, layer=nn.GRU(4, 5, batch_first=True), head=nn.Linear(5, 3)),
        SEQUENCE,
    ),
    "lstm cell": (_cell(nn.LSTMCell), SEQUENCE),
    "gru cell": (_cell(nn.GRUCell), SEQUENCE),
    "pointwise and repeated": (
        lambda: Model(
            lambda m, x: (x * m.scale + m.shift.expand(len(x), 4))[:, :3].sin(),
            scale=torch.randn(4), shift=torch.randn(1, 4),
        ),
        FLAT,
    ),
    "derived": (
        lambda: Model(_weight_norm, weight=torch.randn(3, 4), scale=torch.randn(3)), FLAT
    ),
    "views": (
        lambda: Model(lambda m, x: _patches(m, x).tanh().sum(dim=1), weight=torch.randn(12, 3)),
        SEQUENCE,
    ),
    "fallback": (
        lambda: Model(
            lambda m, x: functional.bilinear(x, x.cos(), m.weight, m.bias),
            weight=torch.randn(3, 4, 4), bias=torch.randn(3),
        ),
        FLAT,
    ),
}  # fmt: skip


def prepared(kind: str, rows: int):
    torch.manual_seed(5)
    make, shape = MODELS[kind]
    inputs = torch.randint(0, 11, (rows, 3)) if shape is None else torch.randn(rows, *shape)
    model = make()
    with torch.no_grad():
        model(inputs[:2])  # lazy layers
    return model, inputs, torch.randint(0, 3, (rows,))


@functools.cache
def plan_of(sampling: str) -> ow.Plan:
    budgets = {number: float(1 + number % 3) for number in range(len(SIZES))}
    owners = ow.Owners(
        np.repeat(np.arange(len(SIZES)), SIZES), budgets, 1e-6, records=np.maximum(SIZES, 1)
    )
    by_owner = {"records_per_owner": None} if sampling == "owner" else {}
    return ow.plan(
        owners, "scale", unit="owner", sampling=sampling, steps=5, batch_size=4, clip_norm=0.3,
        **by_owner,
    )  # fmt: skip


def by_autograd(model, inputs, targets, elements, clip_norms) -> torch.Tensor:
    """The sum of the elements' clipped mean gradients, one element at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters))
    for rows, clip_norm in zip(elements, clip_norms, strict=True):
        loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for p, g in zip(parameters, gradients, strict=True)
            ]
        )
        total += min(1.0, float(clip_norm) / float(gradient.norm())) * gradient
    return total


def compare(kind, sampling, size, sizes) -> None:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    model, inputs, targets = prepared(kind, len(owner))
    options = ow.Performance(micro_batch_size=size)
    step = make_step(model, functional.cross_entropy, plan=plan_of(sampling), performance=options)
    by_owner = sampling == "owner"
    rows = np.arange(len(owner))
    batch = Batch(0, rows, owner, (inputs, targets), by_owner=by_owner)
    elements = [np.flatnonzero(owner == o) for o in np.unique(owner)] if by_owner else rows[:, None]
    owners = np.unique(owner) if by_owner else owner
    limits = step.plan.clip_norms[owners] / (1 + step.slack)
    expected = by_autograd(model, inputs, targets, elements, limits)
    found = flat(step.clipped_sum(batch))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [None, 1, 9])
def test_owners_drawn_whole(kind, size):
    compare(kind, "owner", size, SIZES)


@pytest.mark.parametrize("kind", MODELS)
def test_owners_with_equal_numbers_of_records(kind):
    compare(kind, "owner", None, EQUAL)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [None, 9])
def test_records_drawn(kind, size):
    compare(kind, "record", size, SIZES)


def test_the_models_use_every_rule(monkeypatch):
    used = set()

    class Noted(dict):
        def get(self, func, default=None):
            used.add(super().get(func, default))
            return super().get(func, default)

    monkeypatch.setattr(tape, "RULES", Noted(RULES))
    for kind in MODELS:
        model, inputs, _ = prepared(kind, 3)
        with tape.Tape(model):
            model(inputs)
    assert used >= {*RULES.values(), None}  # None: the fallback
