import math
from itertools import pairwise

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.report.guarantees import attacker_bound, attacker_words, classes_of, spent
from tools.report_tools import small_plan, wide_plan


def test_classes_add_up_to_the_plan():
    plan = small_plan()
    classes = classes_of(plan)
    assert [row.epsilon for row in classes] == [(0.5, 0.5), (2.0, 2.0), (8.0, 8.0)]
    assert [row.records for row in classes] == [200, 300, 500]
    many = classes_of(wide_plan())
    assert len(many) == 8
    assert sum(row.owners for row in many) == 60
    assert all(a.epsilon[1] < b.epsilon[0] for a, b in pairwise(many))


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_what_a_class_has_spent_is_what_the_plan_says(steps):
    plan = wide_plan()
    expected = plan.epsilon(steps=steps)
    classes = classes_of(plan)
    for row, spending in zip(classes, spent(plan, classes, steps), strict=True):
        inside = (plan.targets >= row.epsilon[0]) & (plan.targets <= row.epsilon[1])
        assert (spending.low, spending.high) == (expected[inside].min(), expected[inside].max())
        assert spending.share == (expected[inside] / plan.targets[inside]).max()


def test_an_owner_between_the_ends_of_a_class_may_have_spent_the_most():
    """One of 14 budgets, in the middle of its class, has a far smaller delta."""
    deltas = dict.fromkeys(range(14), 1e-5) | {12: 1e-10}
    owners = ow.Owners(np.arange(1400) % 14, {k: 1 + 0.05 * k for k in range(14)}, deltas)
    plan = ow.plan(owners, "uniform", steps=40, batch_size=200)
    for steps in (5, 40):
        spending = spent(plan, classes_of(plan), steps)
        assert max(each.high for each in spending) == plan.epsilon(steps=steps).max()
        assert 12 in [each.highest_owner for each in spending]


def test_the_best_attacker_is_a_coin_without_privacy_loss_and_certain_without_privacy():
    assert attacker_bound(0.0, 0.0) == 50.0
    assert attacker_bound(math.log(3), 0.0) == pytest.approx(75.0)
    assert attacker_bound(1.0, 0.01) == pytest.approx(100 * (math.e + 0.01) / (1 + math.e))
    assert attacker_bound(5000.0, 1e-5) == 100.0


def test_the_bound_holds_for_the_likelihood_ratio_test_between_gaussians():
    """A Gaussian of one step: no threshold beats the bound at any of its (epsilon, delta)."""
    from scipy.stats import norm

    shift = 0.8
    best = 100 * norm.cdf(shift / 2)
    for eps in (0.1, 0.5, 1.0, 2.0):
        delta = norm.cdf(shift / 2 - eps / shift) - np.exp(eps) * norm.cdf(-shift / 2 - eps / shift)
        assert best <= attacker_bound(eps, delta) + 1e-9


def test_bounds_are_rounded_up():
    assert attacker_words(attacker_bound(0.5, 1e-5)) == "62.3 in 100"
    assert attacker_words(99.9665) == "99.97 in 100"
    assert attacker_words(99.99999) == "100 in 100"
    assert attacker_words(75.0) == "75.0 in 100"


def test_bounds_below_100_are_not_rounded_to_100():
    assert attacker_words(attacker_bound(10.0, 1e-6)) == "99.996 in 100"
    assert attacker_words(57.41) == "57.5 in 100"
    assert attacker_words(100.0) == "100 in 100"
