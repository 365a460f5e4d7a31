"""The check of a model's gradients: few passes, and what it finds where layouts are shared."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.gradients import tape as tape_module
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)


class Through(torch.autograd.Function):
    """Changes records in the forward and in the backward pass, where the tape does not see it."""

    @staticmethod
    def forward(ctx, values, change, back):
        ctx.back = back
        return change(values.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def same(values):
    return values


class Model(nn.Module):
    """A layer with a residual connection, which `Through` may surround."""

    def __init__(self, change=same, back=same):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.change, self.back = change, back

    def forward(self, x):
        hidden = x + functional.gelu(self.first(Through.apply(x, self.change, same)))
        hidden = Through.apply(hidden, self.change, self.back)
        return self.last(hidden)


def step_of(model):
    owners = ow.Owners([0] * 4000, {0: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=20, batch_size=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy)


def batch_of(records, number=0):
    generator = torch.Generator().manual_seed(records)
    x = torch.randn(records, 5, generator=generator)
    y = torch.randint(0, 3, (records,), generator=generator)
    return ow.Batch(number, np.arange(records), np.zeros(records, dtype=np.int64), (x, y))


def test_a_check_costs_few_passes_and_the_step_one(monkeypatch):
    """5 records are sent back 5 times, 32 records 3 times, each half once.

    The first step confirms what the check has learned, on all of its 60 records.
    """
    sizes = []
    send = tape_module.send_back
    monkeypatch.setattr(
        tape_module,
        "send_back",
        lambda model, losses, *rest, **options: (
            sizes.append(len(losses)),
            send(model, losses, *rest, **options),
        ),
    )
    step = step_of(Model())
    for number in range(4):
        sizes.clear()
        step(batch_of(60, number))
        checked = [] if number == 3 else [*[5] * 5, *[32] * 3, 16, 16]
        assert sizes == [*checked, *[60] * (1 if number else 4)]


class Swapping(Model):
    """Two records, known by their contents, are in each other's places in the first layer."""

    pair = None

    def order(self, x):
        order = torch.arange(len(x))
        if self.pair is not None:
            places = [int(p) for each in self.pair for p in (x == each).all(dim=1).nonzero()]
            if len(places) == 2:
                order[places] = order[places[::-1]]
        return order

    def forward(self, x):
        order = self.order(x.detach())

        def move(values):
            return values[order]  # its own inverse

        return self.last(x + Through.apply(self.first(Through.apply(x, move, move)), move, move))


def test_records_in_each_others_places_are_found_at_once():
    """If both are in the same half, they are swapped there and in the whole alike."""
    for _ in range(10):
        model = Swapping()
        step = step_of(model)
        step(batch_of(8))
        model.pair = batch_of(8).data[0][[2, 5]]
        with pytest.raises(ow.OwnerwiseError, match="told apart"):
            step(batch_of(8, 1))


LEAKS = {
    "reversed": lambda gradient: gradient.flip(0),
    "added": lambda gradient: gradient + 1e-3 * gradient.flip(0),
    "from one": lambda gradient: gradient + 1e-2 * gradient[:1],
}


@pytest.mark.parametrize("size", [5, 16, 32])
@pytest.mark.parametrize("name", LEAKS)
def test_mixing_in_one_of_the_runs_alone_is_found(name, size):
    def back(gradient):
        return LEAKS[name](gradient) if len(gradient) == size else gradient

    for _ in range(3):
        step = step_of(Model(back=back))
        with pytest.raises(ow.OwnerwiseError, match=r"gradient of a record changes|told apart"):
            step(batch_of(60))


def test_a_leak_far_below_the_gradient_is_found_in_the_whole():
    """The factors of the passes magnify what a record adds to another by up to 2 ** 31."""

    def back(gradient):
        return gradient + 1e-7 * gradient.roll(1, 0) if len(gradient) == 32 else gradient

    step = step_of(Model(back=back))
    with pytest.raises(ow.OwnerwiseError, match="told apart"):
        step(batch_of(60))
