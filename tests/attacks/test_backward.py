"""A model whose backward pass mixes records, although its outputs do not, is refused.

The attack: gradients of an activation are divided by their norm, or by their largest number, over
the whole batch. The outputs of a record depend on that record alone, and so does its loss, but one
record that dominates the norm moves the sum by hundreds of clip norms.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

CHANGES = {
    "norm": lambda gradient, values: gradient / gradient.norm() * 20,
    "largest": lambda gradient, values: gradient / gradient.abs().max(),
    "activations": lambda gradient, values: gradient * (2 + values.sum().sin()),
    "count": lambda gradient, values: gradient / len(gradient),
}


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, change):
        ctx.change, ctx.values = change, values.detach()
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient, ctx.values), None


class Model(nn.Module):
    def __init__(self, change, by):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.change, self.by = change, by

    def forward(self, x):
        hidden = self.first(x)
        if self.by == "function":
            hidden = Changed.apply(hidden, self.change)
        elif hidden.requires_grad:
            values = hidden.detach()
            hidden.register_hook(lambda gradient: self.change(gradient, values))
        return self.last(functional.dropout(hidden, 0.2) if self.by == "dropout" else hidden)


def step_of(model, hardened=False, loss=functional.cross_entropy, **options):
    owners = ow.Owners([0] * 4000, {0: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=4, batch_size=60, hardened=hardened)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, loss, **options)


def batch_of(records, dtype=torch.float32, number=0):
    generator = torch.Generator().manual_seed(records)
    x = torch.randn(records, 5, generator=generator).to(dtype)
    y = torch.randint(0, 3, (records,), generator=generator)
    return ow.Batch(number, np.arange(records), np.zeros(records, dtype=np.int64), (x, y))


# with dropout, trial runs keep the number of records, so that the masks stay the same
CASES = [
    (n, by) for n in CHANGES for by in ("hook", "function", "dropout") if n + by != "countdropout"
]


def take_steps(step, steps):
    for number in range(steps):
        step(batch_of(60, number=number))


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize(("name", "by"), CASES)
def test_a_backward_pass_that_mixes_records_is_refused(name, by, hardened):
    torch.manual_seed(0)
    step = step_of(Model(CHANGES[name], by), hardened)
    with pytest.raises(ow.OwnerwiseError, match="gradient of a record changes with the other"):
        take_steps(step, 3)  # a secret choice of records shows too little in 1 of 80 steps


def without_conflicts(gradient, values):
    """Removes from each record's gradient what opposes another's, as for several tasks."""
    opposed = (gradient @ gradient.T).clamp(max=0)
    return gradient - opposed / gradient.square().sum(1).clamp(min=1e-30) @ gradient


def by_agreement(gradient, values):
    """Multiplies each number by how many records have the same sign there."""
    return gradient * (2 + gradient.sign() * gradient.sign().mean(0))


@pytest.mark.parametrize("by", ["hook", "function", "dropout"])
@pytest.mark.parametrize("change", [without_conflicts, by_agreement])
@pytest.mark.parametrize("records", [6, 60])
def test_gradients_that_depend_on_whether_others_oppose_them_are_found(change, by, records):
    """One of 60 records moved the sum by 21 clip norms: all gradients in a trial run agreed."""
    torch.manual_seed(0)
    step = step_of(Model(change, by), stream=ow.SecretStream.from_seed(0))
    with pytest.raises(ow.OwnerwiseError, match="gradient of a record changes with the other"):
        step(batch_of(records))


class Opposite(Model):
    """Its two outputs cancel if they are added up."""

    def forward(self, x):
        outputs = super().forward(x)
        return {"for": outputs, "against": -outputs}


def test_outputs_that_cancel_do_not_hide_what_mixes():
    def loss(outputs, targets):
        return functional.cross_entropy(outputs["for"], targets, reduction="none")

    torch.manual_seed(0)
    step = step_of(Opposite(CHANGES["norm"], "hook"), loss=loss)
    with pytest.raises(ow.OwnerwiseError, match="gradient of a record changes with the other"):
        step(batch_of(60))


@pytest.mark.parametrize("micro_batch_size", [None, 40])
@pytest.mark.parametrize("by", ["hook", "function"])
def test_a_backward_pass_that_mixes_only_more_records_than_a_trial_run_has(by, micro_batch_size):
    """A trial run has 32 records; what it shows is confirmed on the batch itself."""

    def if_many(gradient, values):
        return gradient + gradient.roll(1, 0) if len(gradient) > 32 else gradient

    torch.manual_seed(0)
    performance = ow.Performance(micro_batch_size=micro_batch_size)
    step = step_of(Model(if_many, by), performance=performance)
    with pytest.raises(ow.OwnerwiseError, match="told apart"):
        step(batch_of(60 if micro_batch_size is None else 80))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("records", [2, 3, 60])
@pytest.mark.parametrize("by", ["hook", "function", "dropout"])
def test_a_backward_pass_that_changes_each_record_by_itself_is_accepted(by, records, dtype):
    def by_record(gradient, values):
        return gradient / (1 + gradient.norm(dim=1, keepdim=True))

    torch.manual_seed(0)
    step = step_of(Model(by_record, by).to(dtype))
    step(batch_of(records, dtype))
    assert step.steps_spent == 1
