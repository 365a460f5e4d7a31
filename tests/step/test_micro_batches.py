"""Parts of a batch, and how many records fit into memory."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import row_counts, take
from ownerwise.step.micro_batches import bytes_per_record, slices
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

Pair = namedtuple("Pair", ["left", "right"])


@given(records=st.integers(1, 500), size=st.integers(1, 600))
def test_slices_cover_every_record_once(records, size):
    parts = [range(records)[part] for part in slices(records, size)]
    assert [i for part in parts for i in part] == list(range(records))
    lengths = {len(part) for part in parts}
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1


def test_rows_are_taken_from_nested_data():
    rows = torch.arange(12).view(6, 2)
    data = {"a": rows, "b": (rows, [rows]), "c": Pair(rows, rows)}
    part = take(data, slice(2, 4))
    assert torch.equal(part["a"], rows[2:4])
    assert torch.equal(part["b"][1][0], rows[2:4])
    assert isinstance(part["c"], Pair)
    assert torch.equal(part["c"].right, rows[2:4])
    assert torch.equal(take(data, [5, 0])["a"], rows[[5, 0]])
    assert row_counts(data) == {6}
    assert row_counts((rows, rows[:2], torch.zeros(()))) == {6, 2, 0}


@pytest.mark.parametrize("data", [np.zeros(3), "abc", [1, 2], {"a": None}])
def test_what_has_no_rows_is_refused(data):
    for function in (row_counts, lambda data: take(data, slice(0, 1))):
        with pytest.raises(ow.OwnerwiseError, match="expected tensors"):
            function(data)


def test_bytes_per_record_are_those_that_autograd_keeps():
    """Input and two hidden layers (linear and ReLU share one), whatever the size of the batch."""
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU())
    expected = 4 * (100 + 50 + 30)
    for records in (1, 4, 500):
        found = bytes_per_record(model, torch.randn(records, 100), records)
        assert expected <= found <= 1.2 * expected
    wide = nn.Sequential(nn.Linear(100, 500), nn.ReLU(), nn.Linear(500, 30))
    assert bytes_per_record(wide, torch.randn(8, 100), 8) > 3 * expected


def test_parameters_and_buffers_are_no_activations():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(10, 10)
            self.register_buffer("mask", torch.ones(1000, 10))

        def forward(self, input):
            return super().forward(input) * self.mask[0]

    assert bytes_per_record(Masked(), torch.randn(4, 10), 4) <= 4 * 30


class Counts(nn.Module):
    """Notes how many records each forward pass of a step saw."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(100, 3), []

    def forward(self, x):
        self.seen.append(len(x))
        return self.layer(x)


@pytest.mark.parametrize(("fit", "expected"), [(1000, [20]), (7, [6, 7, 7]), (0.5, [1] * 20)])
def test_the_micro_batch_size_follows_the_memory_target(fit, expected):
    model = Counts()
    inputs, labels = torch.randn(20, 100), torch.randint(0, 3, (20,))
    each = bytes_per_record(model, inputs, 20)
    step = tools.make_step(
        model,
        functional.cross_entropy,
        performance=ow.Performance(memory_target=int(fit * each) + 1),
        weights=None,
    )
    step(tools.batch_of(inputs, labels))
    model.seen.clear()
    step(tools.batch_of(inputs, labels, 1))
    assert model.seen == expected


def test_the_probe_leaves_the_global_generator_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    step = tools.make_step(model, functional.cross_entropy)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    step(tools.batch_of(torch.randn(9, 4), torch.randint(0, 3, (9,))))
    torch.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), before)
