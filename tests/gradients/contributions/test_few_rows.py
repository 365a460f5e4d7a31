"""Sums in which most records have the factor zero: those are left out, and nothing changes."""

import pytest
import torch
from torch import nn

from ownerwise.gradients import Tape
from ownerwise.gradients.contributions import few_rows
from tools.record_loop import Model, loop, run

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), (7, 6)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3)),
        (2, 4, 4),
    ),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "frames": (
        lambda: Model(
            lambda m, x: m.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]), conv=nn.Conv1d(3, 4, 2)
        ),
        (3, 3, 4),
    ),
    "recurrent": (
        lambda: Model(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(4, 5, batch_first=True)),
        (6, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kept", [[], [4], [0, 3], list(range(9))])
def test_sums_over_few_records(name, lean, kept):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().double(), torch.randn(9, *shape, dtype=torch.float64)
    factors = torch.zeros(9, dtype=torch.float64)
    factors[kept] = 0.5 + torch.rand(len(kept), dtype=torch.float64)
    sums = run(Tape(model, lean=lean), x).weighted_sum(factors)
    for parameter, rows in loop(model, x).items():
        expected = torch.tensordot(factors, rows, dims=1)
        torch.testing.assert_close(sums[parameter], expected, rtol=0, atol=1e-10)


def test_rows_are_chosen_where_fewer_than_half_count():
    assert few_rows(torch.tensor([0.0, 2.0, 0.0, 0.0])).tolist() == [1]
    assert few_rows(torch.zeros(3)).tolist() == []
    assert few_rows(torch.tensor([1.0, 0.0])) is None
    assert few_rows(torch.zeros(0)) is None
