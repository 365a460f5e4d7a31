"""Layers that set themselves up from their first batch must not see, or keep, a record.

Their parameters would hold statistics of private records without noise. Trial runs (the memory of a
record, the check before training) used real rows.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.evaluation import trial_problems
from ownerwise.step.micro_batches import bytes_per_record
from tools import step_tools as tools


def by_data(m, x):
    m.scale.data.copy_(x.std(0))


def without_graph(m, x):
    with torch.no_grad():
        m.scale.copy_(x.std(0))


def by_number(m, x):
    m.scale.data.fill_(float(x.std()))


def by_array(m, x):
    m.scale.detach().numpy()[:] = x.detach().std(0).numpy()


def replaced(m, x):
    m.scale = nn.Parameter(x.detach().std(0))


def swapped(m, x):
    m.scale.data = x.detach().std(0)


WAYS = [by_data, without_graph, by_number, by_array, replaced, swapped]


class ActNorm(nn.Module):
    """Scales by the statistics of its first batch."""

    def __init__(self, way):
        super().__init__()
        self.way, self.initialised = way, False
        self.scale = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if not self.initialised:
            self.way(self, x)
            self.initialised = True
        return self.layer(x * self.scale)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_trial_runs_leave_nothing_behind(way):
    model = ActNorm(way)
    inputs, labels = 7 * torch.randn(6, 4), torch.arange(6) % 3
    scale = model.scale
    bytes_per_record(model, inputs, 6)
    trial_problems(model, functional.cross_entropy, (inputs, labels), None, "the data")
    assert model.scale is scale
    assert torch.equal(scale, torch.ones(4))
    assert not model.initialised


def test_trial_runs_show_a_model_no_record():
    seen = []

    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(x.detach().clone())
            return super().forward(x)

    model = Noting(4, 3)
    inputs, labels = 7 * torch.randn(6, 4), torch.arange(6) % 3
    bytes_per_record(model, inputs, 6)
    trial_problems(model, functional.cross_entropy, (inputs, labels), None, "the data")
    assert len(seen) == 2
    assert not any(x.any() for x in seen)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("micro", [None, 4])
def test_a_step_refuses_and_the_model_is_as_before(way, micro):
    model = ActNorm(way)
    scale = model.scale
    step = tools.make_step(
        model, functional.cross_entropy, performance=ow.Performance(micro_batch_size=micro)
    )
    with pytest.raises(ow.OwnerwiseError, match="records in the batch"):
        step(tools.batch_of(7 * torch.randn(10, 4), torch.arange(10) % 3))
    assert model.scale is scale
    assert torch.equal(scale, torch.ones(4))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_trainer_refuses_it(way):
    model = ActNorm(way)
    inputs, labels = 7 * torch.randn(tools.RECORDS, 4), torch.arange(tools.RECORDS) % 3
    trainer = ow.Trainer(model, tools.make_plan(batch_size=30), lr=0.1, progress=False)
    with pytest.raises(ow.OwnerwiseError, match="records in the batch"):
        trainer.fit((inputs, labels))
    assert torch.equal(model.scale.detach(), torch.ones(4))


def assigned(m, x):
    m.mean = x.detach().mean(0)


def as_number(m, x):
    m.mean = float(x.mean())


def appended(m, x):
    m.notes.append(x.detach().mean(0))
    m.mean = m.notes[0]


class Remembering(nn.Module):
    """Centres by what an earlier batch left in an attribute."""

    def __init__(self, way):
        super().__init__()
        self.way, self.notes, self.mean, self.passes = way, [], None, 0
        self.used = []
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        self.passes += 1
        self.used.append(self.mean is not None)
        outputs = self.layer(x)
        self.way(self, x)
        return outputs


@pytest.mark.parametrize("way", [assigned, as_number, appended], ids=lambda way: way.__name__)
def test_what_a_pass_leaves_on_a_module_does_not_reach_the_next_one(way):
    model = Remembering(way)
    step = tools.make_step(model, functional.cross_entropy)
    for number in range(4):
        step(tools.batch_of(torch.randn(10, 4), torch.arange(10) % 3, number))
    assert not any(model.used)
    assert model.mean is None
    assert not model.notes
    assert model.passes == 4  # counters stay; trial runs do not count


def test_a_tensor_attribute_takes_no_data():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.layer = torch.zeros(4), nn.Linear(4, 3)

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.layer(x)

    step = tools.make_step(Running(), functional.cross_entropy)
    with pytest.raises(ow.OwnerwiseError, match="records in the batch"):
        step(tools.batch_of(torch.randn(10, 4), torch.arange(10) % 3))
