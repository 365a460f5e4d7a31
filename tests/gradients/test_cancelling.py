"""A record whose terms are huge and cancel: it must not take digits from the others' sums.

Its norm is about 0, so it is not clipped; in float32 its terms would wipe out what was added
before them, and removing the record would bring that back.
"""

import pytest
import torch
from torch import nn

from ownerwise.gradients import Tape

RECORDS = 48
SIZES = [2.0**k for k in (10, 24, 30, 40)]


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    """In float64, none of these terms would cost the others a digit that counts."""
    torch.set_default_dtype(torch.float32)


class Mean(nn.Module):
    """A layer on sequences [records, time, features], and the mean over time."""

    def __init__(self, layer, turned=False):
        super().__init__()
        self.layer, self.turned = layer, turned

    def forward(self, x):
        return self.layer(x.mT).mean(2) if self.turned else self.layer(x).mean(1)


class Read(nn.Module):
    """Words looked up and weighed by a number each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x):
        return (self.table(x[..., 0].long()) * x[..., 1:2]).mean(1)


class Twice(nn.Module):
    """One layer for the first and the last time step: the two uses cancel."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x):
        return self.layer(x[:, 0]) + self.layer(x[:, -1])


class Halves(nn.Module):
    """One layer for either half of a sequence: the two uses cancel, and are formed."""

    def __init__(self, layer, turned=False):
        super().__init__()
        self.mean = Mean(layer, turned)

    def forward(self, x):
        first, last = x.chunk(2, dim=1)
        return self.mean(first) + self.mean(last)


def recurrent():
    layer = nn.RNN(16, 16, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
        layer.weight_ih_l0.zero_()
        layer.bias_ih_l0.fill_(50.0)
    layer.weight_hh_l0.requires_grad_(False)
    layer.bias_ih_l0.requires_grad_(False)
    layer.bias_hh_l0.requires_grad_(False)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0].mean(1)

    return First()


# model, time steps, features, where +M and -M stand
CASES = {
    "linear, formed": (lambda: Mean(nn.Linear(16, 8, bias=False)), 4, 16, (0, -1)),
    "linear, held": (lambda: Mean(nn.Linear(16, 8, bias=False)), 64, 16, (0, -1)),
    "linear, by grams": (lambda: Mean(nn.Linear(256, 256, bias=False)), 4, 256, (0, -1)),
    "convolution": (lambda: Mean(nn.Conv1d(4, 4, 3, bias=False), True), 18, 4, (3, 6)),
    "wide convolution": (lambda: Mean(nn.Conv1d(4, 64, 3, bias=False), True), 18, 4, (3, 6)),
    "embedding": (Read, 16, 2, (0, 1)),
    "long embedding": (Read, 128, 2, (0, 1)),
    "recurrent, time first": (recurrent, 16, 16, (0, -1)),
    "two uses": (Twice, 4, 16, (0, -1)),
    "two uses, formed": (lambda: Halves(nn.Linear(16, 8, bias=False)), 64, 16, (0, -1)),
    "two convolutions": (lambda: Halves(nn.Conv1d(4, 4, 3, bias=False), True), 18, 4, (3, 12)),
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_record_that_cancels_moves_the_sum_by_its_norm_alone(name, size, lean):
    assert moved_by_the_last_record(name, size, 1e-3, lean) <= 1e-3 * (1 + 1e-3)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("size", "slope"), [(1e-30, 1e35), (1e-25, 1e30), (1e-23, 1e30)])
@pytest.mark.parametrize("name", CASES)
def test_terms_of_vanishing_inputs_and_huge_gradients_cancel_too(name, size, slope, lean):
    """The squares of one factor underflow, those of the other overflow: 0 * inf bounds nothing."""
    assert moved_by_the_last_record(name, size, slope, lean) <= 1e-3 * (1 + 1e-3)


class Opposed(nn.Module):
    """The same numbers, used several times: what each use adds is far longer than the sum."""

    def __init__(self, weights):
        super().__init__()
        self.scale, self.weights = nn.Parameter(torch.ones(16)), weights

    def forward(self, x):
        return sum(w * (x[:, number] * self.scale) for number, w in enumerate(self.weights))


# the weight of each use, and where +M and -M stand
USES = {
    "two, of one term each": ([1.0, 1.0], (0, 1)),
    "three, and the first is short": ([1e-3, 1.0, 1.0], (1, 2)),
    "three, and the last is short": ([1.0, 1.0, 1e-3], (0, 1)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", USES)
def test_uses_that_cancel_each_other_move_the_sum_by_their_norm_alone(name, size):
    weights, (plus, minus) = USES[name]
    x = torch.rand(RECORDS, len(weights), 16)
    x[-1] = 0
    x[-1, plus], x[-1, minus] = size, -size
    assert moved(Opposed(weights), x, torch.full((RECORDS,), 1e-3)) <= 1e-3 * (1 + 1e-3)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("size", [2.0, 20.0, 200.0, 2000.0])
@pytest.mark.parametrize("name", ["linear, formed", "linear, by grams", "convolution"])
def test_a_record_whose_terms_nearly_cancel_moves_the_sum_by_its_clip_norm(name, size, lean):
    """Terms up to 250,000 times longer than their sum: its norm is off by 0.2% at most."""
    make, time, features, (plus, minus) = CASES[name]
    torch.manual_seed(3)
    model = make()
    x = torch.rand(RECORDS, time, features) + 0.5
    x[-1] *= 0.01
    x[-1, plus], x[-1, minus] = size, -size
    assert 0.998e-3 <= moved(model, x, torch.ones(RECORDS), lean=lean) <= 1e-3 * (1 + 1e-5)


def moved_by_the_last_record(name, size, slope, lean):
    """Return how far it moves the clipped sum, for the clip norm 1e-3."""
    make, time, features, (plus, minus) = CASES[name]
    torch.manual_seed(3)
    model = make()
    x = torch.randn(RECORDS, time, features).abs()  # records that pull in one direction
    if isinstance(model, Read):
        x[..., 0] = torch.randint(0, 5, (RECORDS, time)).float()
    x[-1] = 0
    x[-1, plus, 1 if isinstance(model, Read) else slice(None)] = size
    x[-1, minus, 1 if isinstance(model, Read) else slice(None)] = -size
    slopes = torch.full((RECORDS,), 1e-3)
    slopes[-1] = slope
    return moved(model, x, slopes, lean=lean)


def moved(model, x, slopes, *, lean=False):
    """Return how far the last record moves the sum of gradients clipped to 1e-3."""
    tape = Tape(model, lean=lean)

    def clipped_sum(rows):
        with tape:
            outputs = model(rows)
        weights = torch.linspace(1, 2, outputs.shape[1])
        records = tape.backward((outputs * weights).sum(dim=1) * slopes[: len(rows)])
        return records.weighted_sum((1e-3 / records.norms).clamp(max=1.0))

    with_it, without = clipped_sum(x), clipped_sum(x[:-1])
    parts = [(with_it[p] - without[p]).double().norm() for p in with_it]
    return float(torch.stack(parts).norm())
