"""Metrics of regression against scikit-learn's, overall, by group and by owner."""

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import nn

import ownerwise as ow
from ownerwise.evaluation import Evaluation
from ownerwise.evaluation.regression import regression_summary

GENERATOR = np.random.default_rng(0)
ACTUAL = GENERATOR.uniform(10, 90, 60)
PREDICTED = ACTUAL + GENERATOR.normal(0, 12, 60)
GROUPS = np.array(["a", "b", "few"])[np.repeat([0, 1, 2], [30, 25, 5])]


def test_metrics_are_scikit_learns():
    found = regression_summary(np.ones(60), PREDICTED, ACTUAL, GROUPS, None)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(ACTUAL, PREDICTED))
    assert found["mae"] == pytest.approx(mean_absolute_error(ACTUAL, PREDICTED))
    assert found["r2"] == pytest.approx(r2_score(ACTUAL, PREDICTED))
    assert found["trivial_rmse"] == pytest.approx(ACTUAL.std())
    assert found["groups"].keys() == {"a", "b"}  # fewer than 10 records are left out
    for name, group in found["groups"].items():
        of = name == GROUPS
        assert group["rmse"] == pytest.approx(root_mean_squared_error(ACTUAL[of], PREDICTED[of]))
        trivial = np.full(of.sum(), ACTUAL.mean())
        assert group["trivial_rmse"] == pytest.approx(root_mean_squared_error(ACTUAL[of], trivial))
        assert group["r2"] == pytest.approx(1 - (group["rmse"] / group["trivial_rmse"]) ** 2)
    worst = max(found["groups"], key=lambda name: found["groups"][name]["rmse"])
    assert found["worst_group"] == {"name": worst, "rmse": found["groups"][worst]["rmse"]}


def test_every_owner_counts_equally():
    owners = np.repeat([1, 2], [50, 10])
    errors = np.repeat([1.0, 5.0], [50, 10])
    found = regression_summary(np.ones(60), ACTUAL + errors, ACTUAL, None, owners)
    assert found["owner_mae"] == pytest.approx(3.0)
    assert found["mae"] == pytest.approx((50 + 50) / 60)


def test_constant_targets_have_no_r2():
    found = regression_summary(np.ones(3), np.ones(3), np.zeros(3), None, None)
    assert found["r2"] is None
    assert found["worst_group"] is found["spread"] is None


def test_an_evaluation_works_in_the_targets_units():
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    scaled = torch.linspace(-1, 1, 40)[:, None]
    y = 50 + 50 * scaled[:, 0] + 3
    y[-2:] = 500  # a target beyond the range is compared as it is
    found = Evaluation((scaled, y))(model, ow.RegressionLoss(0, 100))
    errors = (50 + 50 * scaled[:, 0] - y).double().numpy()
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(errors).mean()), rel=1e-5)
