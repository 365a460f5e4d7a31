"""Calls without a rule: arguments that have as many entries as the batch has records by chance."""

import pytest
import torch

from ownerwise.gradients import Refused, Tape
from tools.record_loop import Model, assert_equal, loop, norms_of, run

WIDTH = 8
SCALE = torch.logspace(-3, 3, WIDTH, dtype=torch.float64)


def scaled(m, x, scale):
    return torch.einsum("bi,ij,j->bj", x, m.w, scale)


def buffered(weight=None, forward=lambda m, x: scaled(m, x, m.scale)):
    weight = torch.randn(4, WIDTH, dtype=torch.float64) if weight is None else weight
    model = Model(forward, w=weight)
    model.register_buffer("scale", SCALE.clone())
    return model


def compare_with_loop(tape, x):
    assert_equal(run(tape, x), loop(tape.model, x))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("first", [3, WIDTH])
@pytest.mark.parametrize("weight", [None, torch.zeros(4, WIDTH, dtype=torch.float64)])
def test_a_buffer_as_long_as_the_batch(first, weight):
    """In the first batch or a later one; with weights of zero no output shows the difference."""
    model = buffered(weight)
    tape = Tape(model)
    for count in (first, WIDTH, 5, WIDTH):
        compare_with_loop(tape, torch.randn(count, 4, dtype=torch.float64))


def test_a_second_use_is_compared_too():
    """Of the same parameter by the same function."""

    def forward(m, x):
        return torch.einsum("bi,ij->bj", scaled(m, x, m.scale), m.w)

    model = buffered(torch.randn(WIDTH, WIDTH, dtype=torch.float64), forward)
    compare_with_loop(Tape(model), torch.randn(WIDTH, WIDTH, dtype=torch.float64))


def test_a_tensor_created_during_the_forward_pass():
    """It may be data, so that it is sliced; the run stops rather than train on that."""
    made = SCALE.tolist()
    model = buffered(forward=lambda m, x: scaled(m, x, torch.tensor(made, dtype=x.dtype)))
    tape = Tape(model)
    compare_with_loop(tape, torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(Refused, match="on a single record"):
        run(tape, torch.randn(WIDTH, 4, dtype=torch.float64))


def test_a_constant_with_a_row_for_every_record():
    """It is sliced, since the call on one record does not work without."""

    def forward(m, x):
        rows = torch.ones(len(x), WIDTH, dtype=x.dtype)
        return torch.einsum("bi,ij,bj->bj", x, m.w, rows)

    model = Model(forward, w=torch.randn(4, WIDTH, dtype=torch.float64))
    compare_with_loop(Tape(model), torch.randn(5, 4, dtype=torch.float64))


def test_the_sum_is_made_of_what_was_measured():
    """Whatever is sliced, no record weighs more than its norm says."""
    model = buffered()
    tape = Tape(model)
    x = torch.randn(WIDTH, 4, dtype=torch.float64)
    records = run(tape, x)
    assert torch.allclose(records.norms, norms_of(loop(model, x)))
    for i in range(WIDTH):
        only = torch.zeros(WIDTH, dtype=torch.float64)
        only[i] = 1 / records.norms[i]
        total = records.weighted_sum(only)
        length = torch.sqrt(sum(part.square().sum() for part in total.values()))
        assert float(length) == pytest.approx(1.0)
