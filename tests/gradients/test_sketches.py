"""Sketches are linear functions of the per-record gradients, and layouts that are not yet shown."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ownerwise.gradients import Tape, separation
from ownerwise.gradients.contributions import sketch_of
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.sketches import SKETCHES, Sketcher


class Everything(nn.Module):
    """Uses of every form: tied look-ups, outer products, kernels, vectors, a derived matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.kernel = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.derived = parametrizations.weight_norm(nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids):
        hidden = self.norm(self.embedding(ids))
        hidden = self.kernel(hidden.transpose(1, 2)).transpose(1, 2) * self.scale
        hidden = torch.tanh(self.derived(hidden))
        return functional.linear(hidden, self.embedding.weight)


def test_sketches_are_products_with_the_gradients():
    torch.manual_seed(0)
    model = Everything().double()
    ids = torch.randint(0, 7, (4, 5))
    tape = Tape(model)

    def losses():
        with tape:
            outputs = model(ids)
        return outputs.sin().flatten(1).sum(dim=1)

    sketches = tape.sketches(losses())
    gradients = tape.backward(losses())
    sketcher = Sketcher(gradients.parameters, 4)
    expected = torch.zeros(4, SKETCHES, dtype=torch.float64)
    for parameter, formed in gradients.per_record().items():
        for k, (left, right) in enumerate(zip(*sketcher._vectors(parameter), strict=True)):
            matrix = torch.outer(left, right).double().reshape(parameter.shape)
            expected[:, k] += (formed * matrix).reshape(4, -1).sum(dim=1) / SKETCHES**0.5
    torch.testing.assert_close(sketches, expected)
    assert 0.3 < float((sketches.norm(dim=1) / gradients.norms).mean()) < 3


def test_a_sketch_of_gradients_is_their_product_with_outer_products():
    formed, left, right = torch.randn(3, 4, 2, 5), torch.randn(8, 4), torch.randn(8, 10)
    expected = torch.einsum("nij,ki,kj->nk", formed.flatten(2), left, right)
    torch.testing.assert_close(sketch_of(formed, left, right), expected)


class Adapter(nn.Module):
    """An adapter as in LoRA: the second matrix is zero at first, so the first has no gradient."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


def test_a_gradient_that_was_zero_is_observed_once_it_is_not():
    torch.manual_seed(0)
    model = Adapter().double()
    x = torch.randn(6, 5, dtype=torch.float64)
    tape = Tape(model)
    passes = []

    def norms(used):
        passes.clear()
        with used:
            outputs = model(x)
        outputs.register_hook(passes.append)
        return used.backward(outputs.sin().sum(dim=1)).norms

    norms(tape)
    assert len(passes) == 5  # 4 to observe 6 records
    norms(tape)
    assert len(passes) == 3  # 2 to confirm
    nn.init.normal_(model.up.weight)
    found = norms(tape)
    assert len(passes) == 6  # 1 to see that it is no longer zero, 4 to observe
    torch.testing.assert_close(found, norms(Tape(model)))
    norms(tape)
    assert len(passes) == 1


def test_what_a_use_saved_is_freed_during_the_backward_pass():
    model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(6)), nn.Linear(4, 4))
    tape = Tape(model)
    x = torch.randn(3, 4, requires_grad=True)
    alive = []

    def count(gradient):
        gc.collect()
        alive.append(sum(type(each) is Saved for each in gc.get_objects()))

    x.register_hook(count)
    with tape:
        outputs = model(x)
    tape.backward(outputs.sum(dim=1))
    assert alive[0] >= 7  # while it is observed where the records lie
    assert alive[-1] == 0


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("changed", [0, 4])
def test_rows_are_compared_in_parts(monkeypatch, at_once, changed):
    monkeypatch.setattr(separation, "_AT_ONCE", at_once)
    first = torch.randn(5, 3)
    second = first.clone()
    second[changed] *= 1.01
    assert separation.close(first, first.clone(), 1e-9)
    assert separation.close(first, second, 0.02)
    assert not separation.close(first, second, 0.005)
