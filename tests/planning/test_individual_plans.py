"""Plans with individual accounting: limits, clip norms, noise, the epsilon they state, refusals."""

from dataclasses import replace

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.accounting import gaussian_delta, gaussian_mu

EPSILON = {"ada": 0.5, "ben": 1.0, "cy": 4.0}


def owners(**options) -> ow.Owners:
    return ow.Owners(np.resize(list(EPSILON), 90), EPSILON, **options)


def make_plan(**options) -> ow.Plan:
    return ow.plan(owners(), **{"method": "individual", "steps": 100, **options})


@pytest.mark.parametrize("name", ["gdp", "rdp", "zcdp"])
@pytest.mark.parametrize("mixture", [None, 0.0, 0.5])
def test_noise_limits_and_clip_norms_belong_together(name, mixture):
    plan = make_plan(filter=name, mixture=mixture, clipped_steps=40, clip_norm=2.0)
    assert plan.clip_norms @ plan.records / 90 == pytest.approx(2.0)
    if mixture is None:
        assert (plan.clipped_steps == 40).all()
    else:
        assert plan.clipped_steps.min() == 40
        assert (np.diff(plan.clipped_steps) > 0).all()
    assert (gaussian_delta(plan.filter_limits**0.5, plan.targets) <= plan.deltas).all()
    assert plan.expected_batch_size == plan.hardened_rows == 90
    assert (plan.sampling_rates == 1).all()
    floor = 0.995 if name == "gdp" else 0.85
    assert (plan.epsilon() <= plan.targets).all()
    reached = plan.clipped_steps <= 100
    assert (plan.epsilon() >= floor * plan.targets)[reached].all()
    assert reached.any()


def test_epsilon_is_that_of_clipped_gradients_until_the_budget_is_used_up():
    plan = make_plan(clipped_steps=40)
    spent = np.array([plan.epsilon(steps=k) for k in (0, 10, 39, 40, 60, 100)])
    assert (spent[0] == 0).all()
    assert (np.diff(spent[:4], axis=0) > 0).all()
    np.testing.assert_allclose(spent[3], spent[5], rtol=1e-6)
    np.testing.assert_allclose(spent[5], plan.targets, rtol=5e-3)
    mu = 10**0.5 / plan.noise_multipliers
    deltas = plan.accounted_deltas
    assert (gaussian_delta(mu, spent[1]) <= deltas).all()
    assert (gaussian_delta(mu, 0.999 * spent[1]) >= 0.98 * deltas).all()


def test_all_records_of_an_owner_together_are_a_larger_gaussian():
    plan = make_plan(clipped_steps=40)
    for owner, spent in enumerate(plan.owner_epsilon()):
        mu = 30 * plan.filter_limits[owner] ** 0.5
        if np.isfinite(spent):
            assert gaussian_delta(mu, spent) <= plan.accounted_deltas[owner]
    two = ow.plan(
        ow.Owners([0, 0, 1], {0: 0.5, 1: 0.5}), method="individual", steps=5, clipped_steps=2
    )
    mu = gaussian_mu(0.5, 1e-5)
    assert gaussian_delta(2 * mu, two.owner_epsilon()[0]) == pytest.approx(1e-5, rel=0.05)


def test_the_noise_may_be_given():
    plan = make_plan(noise_multiplier=50.0, clip_norm=0.5)
    assert plan.noise_std == 25.0
    np.testing.assert_array_equal(
        plan.clipped_steps, np.floor(plan.filter_limits * plan.noise_multipliers**2)
    )


def test_a_stored_plan_is_the_same(tmp_path):
    plan = make_plan(clipped_steps=40, clip_to_remaining=True, filter="zcdp")
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json", owners())
    assert again == plan
    assert (again.filter, again.clip_to_remaining) == ("zcdp", True)
    np.testing.assert_array_equal(again.filter_limits, plan.filter_limits)


def test_the_description_names_the_filter():
    text = make_plan(clipped_steps=40, mixture=0.0).describe()
    assert "individual accounting by a GDP filter: 40 to" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"filter_limits": 1.01}, "more than an owner's budget"),
        ({"filter": None}, "without a filter"),
        ({"filter": "pld"}, "expected one of gdp, rdp, zcdp"),
        ({"sampling_rates": 0.5, "expected_batch_size": 45.0}, "steps use all records"),
        ({"hardened_rows": None}, "the number of all rows"),
        ({"release_std": 5.0}, "release_std with a filter"),
        ({"closing_std": 5.0, "closing_count": 1}, "closing_std with a filter"),
        ({"schedule": ow.Schedule(((50, 1.0), (50, 0.5)))}, "constant noise"),
        ({"method": "uniform"}, "method 'individual'"),
        ({"clip_to_remaining": 1}, "expected True or False"),
        ({"noise_std": 0.5}, None),
    ],
)
def test_a_changed_plan_is_refused(changes, words):
    plan = make_plan(clipped_steps=40)
    for name in ("filter_limits", "sampling_rates"):
        if name in changes:
            changes = {**changes, name: getattr(plan, name) * changes[name]}
    changed = replace(plan, **changes)
    if words is None:  # less noise means fewer steps, not less privacy
        assert changed.verify().highest_ratio <= 1
        assert (changed.clipped_steps == 0).all()
        return
    with pytest.raises(ow.PlanError, match=words):
        changed.verify()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_to_remaining": "no"}, "expected True or False"),
        ({"constraints": object()}, "adds to the histogram"),
        ({"calibration": ow.Calibration()}, "after training"),
        ({"statistics": ow.ColumnStatistics()}, "statistics"),
        ({"release_std": 3.0}, "even if its gradient is zero"),
        ({"clip_norm": "adaptive"}, "adaptive clip norm"),
        ({"noise_schedule": "exponential"}, "constant noise"),
        ({"batch_size": 30}, "every step uses all records"),
        ({"steps": None, "epochs": 3}, "steps"),
        ({"accountant": "rdp"}, "filter='rdp'"),
        ({"noise_multiplier": 3.0, "clipped_steps": 9}, "at most one"),
        ({"clipped_steps": 0}, "clipped_steps 0"),
        ({"filter": "pld"}, "filter 'pld'"),
        ({"unit": "owner", "sampling": "record"}, "sampling='owner'"),
        ({"unit": "owner", "records_per_owner": 3}, "records_per_owner 3"),
        ({"method": "uniform", "batch_size": 9, "clipped_steps": 9}, "clipped_steps 9"),
        ({"method": "uniform", "batch_size": 9, "filter": "gdp"}, "filter 'gdp'"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, words):
    with pytest.raises(ow.PlanError, match=words):
        make_plan(**options)


def test_many_budgets_are_planned_at_once():
    epsilon = np.geomspace(0.1, 8, 20_000)
    plan = ow.plan(ow.Owners(None, epsilon), method="individual", steps=50, clipped_steps=20)
    assert (np.diff(plan.filter_limits) > 0).all()
    assert (plan.clipped_steps == 20).all()
