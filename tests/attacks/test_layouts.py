"""Records that lie folded in a tensor are told apart, whatever the first batches looked like.

The attack: a model that folds time and records into one dimension and uses one time step only. In a
batch of two records, or one in which few records have a gradient, two layouts explain what is seen.
If the wrong one is kept, records are clipped together or with another owner's clip norm.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)


class OneTimeStep(nn.Module):
    def __init__(self, length, used):
        super().__init__()
        self.length, self.used = length, used
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        records = len(x)
        hidden = x.transpose(0, 1).reshape(self.length * records, 5)
        hidden = torch.tanh(self.first(hidden)).reshape(self.length, records, 6)
        return self.last(hidden[self.used])


def plan_of():
    owners = ow.Owners(np.arange(4000) % 2, {0: 0.5, 1: 20.0}, 1e-5)
    return ow.plan(owners, "scale", steps=20, batch_size=8)


def batch_of(x, y, rows):
    rows = np.asarray(rows)
    return ow.Batch(0, rows, rows % 2, (x[rows], y[rows]))


def largest_movement(step, x, y, counts, removed=16):
    """How far the removal of one record moves the sum at most, in its owner's clip norms."""
    movements = []
    for count in counts:
        whole = tools.flat(step.clipped_sum(batch_of(x, y, range(count))))
        for gone in range(min(count, removed)):
            rest = [row for row in range(count) if row != gone]
            moved = whole - tools.flat(step.clipped_sum(batch_of(x, y, rest)))
            movements.append(float(moved.norm()) / step.plan.clip_norms[gone % 2])
    return max(movements)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("first", [1, 2, 3, 4, 8])
def test_the_first_batch_does_not_decide_for_later_ones(first, used, micro_batch_size):
    torch.manual_seed(0)
    model = OneTimeStep(3, used)
    step = tools.make_step(
        model,
        functional.cross_entropy,
        plan=plan_of(),
        performance=ow.Performance(micro_batch_size=micro_batch_size),
    )
    x, y = 3 * torch.randn(16, 3, 5), torch.randint(0, 3, (16,))
    step(batch_of(x, y, range(first)))
    assert largest_movement(step, x, y, (2, 4, 5, 8)) <= 1.0


@pytest.mark.parametrize("length", [2, 3, 16])
@pytest.mark.parametrize("labelled", [[15], [0], [3, 12], [1, 2, 4, 8]])
def test_a_few_records_with_gradients_are_clipped_as_themselves(labelled, length):
    torch.manual_seed(0)
    model = OneTimeStep(length, length - 1)
    step = tools.make_step(model, functional.cross_entropy, plan=plan_of())
    x, y = 3 * torch.randn(16, length, 5), torch.full((16,), -100)
    y[labelled] = torch.randint(0, 3, (len(labelled),))
    assert largest_movement(step, x, y, (16,)) <= 1.0


class InOrder(nn.Module):
    """Sorts the records by their first feature, and puts the results back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        order = x[:, 0].argsort(stable=True)
        return self.last(torch.tanh(self.first(x[order])))[order.argsort()]


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_records_that_were_in_order_at_first(micro_batch_size):
    """Removing one record moved the sum by 3.5 clip norms, because all others changed places."""
    torch.manual_seed(0)
    step = tools.make_step(
        InOrder(),
        functional.cross_entropy,
        plan=plan_of(),
        performance=ow.Performance(micro_batch_size=micro_batch_size),
    )
    x, y = 3 * torch.randn(16, 5), torch.randint(0, 3, (16,))
    in_order = x.clone()
    in_order[:, 0] = 1.0
    for _ in range(9):  # the model itself is checked in batches 0, 1, 2, 4, 8 and 16
        step.clipped_sum(batch_of(in_order, y, range(8)))
    with pytest.raises(ow.OwnerwiseError, match="told apart"):
        largest_movement(step, x, y, (8,), removed=6)


class ByPlace(nn.Module):
    """Adds a row of a table that is zero at first, chosen by the place in the batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(5, 3), nn.Parameter(torch.zeros(8, 3))

    def forward(self, x):
        places = torch.arange(len(x)) + 0 * x[:, 0].long()
        return self.layer(x) + self.rows[places % 8]


def test_a_place_that_decides_only_where_a_gradient_goes():
    """In the first step, no output depends on the place, but each record trains another row."""
    torch.manual_seed(0)
    step = tools.make_step(ByPlace(), functional.cross_entropy, plan=plan_of())
    x, y = 3 * torch.randn(16, 5), torch.randint(0, 3, (16,))
    with pytest.raises(ow.OwnerwiseError, match="gradient of a record changes"):
        step.clipped_sum(batch_of(x, y, range(8)))
