"""The regression loss: scaling from a declared range, one record at a time, and its refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import REGRESSION_LOSSES, never_mixes, per_record
from tools import step_tools as tools

_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


@given(st.lists(st.floats(-500, 500), min_size=1, max_size=5), st.floats(-100, 0), st.floats(1, 99))
def test_predictions_and_scaled_targets_are_inverse_to_each_other(targets, low, high):
    loss = ow.RegressionLoss(low, high)
    y = torch.tensor(targets)
    scaled = (2 * (y.clamp(low, high) - low) / (high - low) - 1)[:, None]
    torch.testing.assert_close(loss.numbers(scaled), y.clamp(low, high))
    assert float(loss(scaled, y)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", REGRESSION_LOSSES)
def test_a_records_loss_is_its_own(name):
    """Each entry equals the torch loss of that record alone."""
    generator = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(7, 1, generator=generator), 40 * torch.randn(7, generator=generator)
    loss = ow.RegressionLoss(-50, 50, REGRESSION_LOSSES[name])
    found = per_record(loss)(outputs, y)
    alone = [
        REGRESSION_LOSSES[name](o[0], (t / 50).clamp(-1, 1))
        for o, t in zip(outputs, y, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(alone))
    assert never_mixes(loss, outputs, y)
    column = per_record(loss)(outputs, y[:, None])
    torch.testing.assert_close(column, found)


def test_the_step_bounds_a_targets_influence():
    """A target far outside the range counts as one at its end."""
    sums = []
    for outlier in (50.0, 1e9):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        inputs, y = torch.ones(4, 3), torch.tensor([1.0, 2.0, 3.0, outlier])
        step = tools.make_step(model, ow.RegressionLoss(0, 50))
        sums.append(tools.flat(step.clipped_sum(tools.batch_of(inputs, y))))
    assert torch.equal(*sums)


def test_what_only_classifiers_can_use_is_refused():
    loss, model = ow.RegressionLoss(0, 1), nn.Linear(4, 1)
    plan = tools.make_plan(calibration=ow.Calibration())
    with pytest.raises(OwnerwiseError, match="calibration with a RegressionLoss"):
        tools.make_step(model, loss, plan=plan)
    repair = ow.PullAdjustment(tau=1.0, counts=np.full((3, 2), 10))
    with pytest.raises(OwnerwiseError, match="repair with a RegressionLoss"):
        tools.make_step(model, loss, repair=repair)


@pytest.mark.parametrize("range_", [(1, 0), (0, np.nan), (-1e308, 1e308), ("0", 1), (True, 2)])
def test_ranges_that_cannot_be_used(range_):
    with pytest.raises(OwnerwiseError, match="two finite numbers"):
        ow.RegressionLoss(*range_)
    with pytest.raises(OwnerwiseError, match="'cross_entropy': expected one of mse_loss"):
        ow.RegressionLoss(0, 1, functional.cross_entropy)


def test_a_model_with_many_outputs_is_refused_before_any_step():
    data = torch.randn(tools.RECORDS, 4), torch.rand(tools.RECORDS)
    trainer = ow.Trainer(tools.mlp(), tools.make_plan(), lr=0.1, loss=ow.RegressionLoss(0, 1))
    with pytest.raises(OwnerwiseError, match="give the model a single output"):
        trainer.fit(data)
