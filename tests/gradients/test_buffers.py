"""Buffers must not take data of the batch: checkpoints hold them, and no noise covers them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ownerwise.gradients import Refused, Tape, check
from tools import step_tools as tools
from tools.record_loop import assert_matches_loop, run


def without_graph(m, x):
    with torch.no_grad():
        m.mean.mul_(0.0).add_(x.mean(0))


def assigned(m, x):
    m.mean = 0 * m.mean + x.mean(0)


def by_data(m, x):
    m.mean.data.copy_(x.mean(0))


def by_view(m, x):
    with torch.no_grad():
        m.mean[:2].copy_(x.mean(0)[:2])


def by_item(m, x):
    m.mean[0] = x.mean()


def by_out(m, x):
    with torch.no_grad():
        torch.mean(x, 0, out=m.mean)


def added(m, x):
    m.register_buffer("seen", x.mean(0))


def by_instance_norm(m, x):
    functional.instance_norm(x[:, :, None].expand(-1, -1, 2), m.mean, torch.ones(4))


def by_statistics(m, x):
    torch.batch_norm_update_stats(x, m.mean, torch.ones(4), 0.1)


def by_number(m, x):
    m.mean.fill_(float(x.mean()))


def by_array(m, x):
    m.mean.numpy()[:] = x.mean(0).detach().numpy()


UNSEEN = [by_instance_norm, by_statistics, by_number, by_array]  # no call shows the write
WAYS = [without_graph, assigned, by_data, by_view, by_item, by_out, added]


class Watching(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.way(self, x)
        return self.linear(x)


@pytest.mark.parametrize("way", WAYS)
def test_data_that_goes_into_a_buffer_is_refused(way):
    """With and without a graph, whatever way it takes."""
    tape = Tape(Watching(way))
    with pytest.raises(Refused, match="records in the batch"):
        run(tape, torch.randn(5, 4))


@pytest.mark.parametrize("way", [way for way in WAYS if way is not assigned])  # torch refuses it
def test_a_frozen_parameter_takes_no_data_either(way):
    model = Watching(way)
    del model.mean
    model.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
    tape = Tape(model)
    with pytest.raises(Refused, match="records in the batch"):
        run(tape, torch.randn(5, 4))


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_without_gradients_is_watched_too(way):
    """The first of two passes, where a batch is cut."""
    tape = Tape(Watching(way))
    with pytest.raises(Refused, match="records in the batch"), torch.no_grad(), tape:
        tape.model(torch.randn(5, 4))


@pytest.mark.parametrize("way", WAYS + UNSEEN)
def test_the_check_on_a_sample_finds_what_no_call_shows(way):
    model = Watching(way)
    before = model.mean
    problems = check(model, torch.randn(5, 4))
    assert any("records in the batch" in problem.what for problem in problems)
    assert model.mean is before
    assert not before.any()


@pytest.mark.parametrize("way", WAYS + UNSEEN)
def test_the_step_itself_refuses_data_written_into_the_model(way):
    step = tools.make_step(Watching(way), functional.cross_entropy)
    with pytest.raises(Refused, match="records in the batch"):
        step(tools.batch_of(torch.randn(5, 4), torch.arange(5) % 3))


def test_a_table_of_words_is_not_rescaled_by_the_words_that_occur():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 4))
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            with torch.no_grad():
                embedded = functional.embedding((x[:, 0] > 0).long(), self.table, max_norm=0.5)
            return self.linear(x + embedded)

    problems = check(Words(), torch.tensor([[1.0] * 4, [-1.0] * 4]))
    assert any("records in the batch" in problem.what for problem in problems)


def test_a_model_that_has_moved_is_still_watched():
    """Its tensors are the same ones, elsewhere in memory."""
    model = Watching(lambda m, x: None)
    tape = Tape(model)
    run(tape, torch.randn(5, 4))
    model.double()
    model.way = by_view
    with pytest.raises(Refused, match="records in the batch"):
        run(tape, torch.randn(5, 4, dtype=torch.float64))


def test_buffers_that_change_without_data_are_fine():
    """Counters, and what is computed from the weights, such as spectral norms."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = parametrizations.spectral_norm(nn.Linear(4, 3))
            self.register_buffer("passes", torch.zeros(()))
            self.register_buffer("ramp", torch.ones(3))

        def forward(self, x):
            self.passes += 1
            with torch.no_grad():
                self.ramp.copy_(torch.linspace(0, 1, 3))
            self.last = self.ramp * 2
            return self.linear(x) * self.ramp

    model = Counting()
    for _ in range(3):
        run(Tape(model), torch.randn(5, 4))
    assert float(model.passes) == 3
    assert_matches_loop(Counting().double().eval(), torch.randn(5, 4, dtype=torch.float64))
