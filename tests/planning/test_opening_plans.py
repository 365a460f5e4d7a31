"""Plans that pay for column statistics, a release from all records before training."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds
from scipy.stats import binom

import ownerwise as ow
from ownerwise.accounting import OpeningRelease, RunCost, Schedule, gaussian_mu
from ownerwise.errors import AccountingError

DELTA = 1e-5
BUDGETS = (1.0, 3.0, 8.0)


def make(method="sample", each=400, **options):
    owners = ow.Owners(np.repeat(np.arange(3), each), np.array(BUDGETS), DELTA)
    options = {"steps": 60, "batch_size": 60, **options}
    return ow.plan(owners, method, statistics=ow.ColumnStatistics(share=0.1), **options)


def by_dp_accounting(plan, owner, records=1, length=1.0, width=1e-3):
    """Every part by itself: the steps, the closing sums and the sum before training."""
    options = {"value_discretization_interval": width}
    rate, noise = float(plan.sampling_rates[owner]), float(plan.noise_multipliers[owner])
    if records == 1:
        sampled = plds.from_gaussian_mechanism(noise, sampling_prob=rate, **options)
    else:
        drawn = np.arange(records + 1)
        sampled = plds.from_mixture_gaussian_mechanism(
            noise, drawn.tolist(), binom.pmf(drawn, records, rate).tolist(), **options
        )
    composed = sampled.self_compose(plan.steps)
    parts = [plan.opening_std / length, *[plan.closing_std] * plan.closing_count]
    for std in parts:
        composed = composed.compose(plds.from_gaussian_mechanism(std, **options))
    return composed.get_epsilon_for_delta(DELTA)


@pytest.mark.parametrize("method", ["uniform", "sample", "scale", "both"])
def test_every_owner_spends_the_budget_and_no_more(method):
    plan = make(method)
    spent = np.array([by_dp_accounting(plan, owner, width=3e-4) for owner in range(3)])
    assert (spent <= plan.targets).all()
    assert (spent[:1] if method == "uniform" else spent >= 0.99 * plan.targets).all()
    np.testing.assert_allclose(plan.epsilon(), spent, rtol=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_with_a_calibration_too(accountant):
    plan = make(calibration=ow.Calibration(share=0.2), accountant=accountant)
    spent = np.array([by_dp_accounting(plan, owner, width=5e-4) for owner in range(3)])
    assert (spent <= plan.epsilon() * (1 + 1e-3)).all()
    assert (plan.epsilon() <= plan.targets).all()
    if accountant == "pld":
        np.testing.assert_allclose(plan.epsilon(), spent, rtol=2e-3)


def test_an_owner_with_k_records_and_records_as_the_unit():
    """All K records move the sum by up to K."""
    plan = make(each=3, batch_size=2, steps=4)
    spent = by_dp_accounting(plan, 0, records=3, length=3.0, width=5e-3)
    assert float(plan.owner_epsilon()[0]) == pytest.approx(spent, rel=1e-2)
    single = by_dp_accounting(plan, 0, records=3, length=1.0, width=5e-3)
    assert spent > 1.02 * single


def test_an_owner_with_very_many_records():
    """The statistics alone shift the sum by more than 30 standard deviations."""
    plan = make(steps=1, batch_size=1, each=1500)
    assert (plan.owner_epsilon() == np.inf).all()
    assert (plan.owner_epsilon(steps=0) == np.inf).all()


def test_owners_as_the_unit_with_record_sampling():
    """All K records together move the sum by at most 1, and are drawn one by one."""
    plan = make(each=3, unit="owner", sampling="record", batch_size=2, steps=4)
    spent = by_dp_accounting(plan, 0, records=3, width=5e-3)
    assert 0.98 * spent <= plan.epsilon()[0] <= 1.01 * spent
    assert float(plan.record_epsilon()[0]) == pytest.approx(by_dp_accounting(plan, 0), rel=1e-2)


def test_owners_as_the_unit_with_owner_sampling():
    plan = make(unit="owner", batch_size=1, steps=10)
    spent = np.array([by_dp_accounting(plan, owner) for owner in range(3)])
    assert (spent <= plan.targets).all()
    np.testing.assert_allclose(plan.epsilon(), spent, rtol=1e-2)


def test_it_counts_from_the_start():
    """Also before the first step: the statistics have left then."""
    plan = make()
    only = plan.epsilon(steps=0)
    share = math.sqrt(0.1) * gaussian_mu(1.0, DELTA)
    np.testing.assert_allclose([gaussian_mu(float(e), DELTA) for e in only], share, rtol=5e-3)
    assert (plan.epsilon(steps=1) > only).all()
    assert (plan.epsilon() > plan.epsilon(steps=59)).all()
    assert (plan.owner_epsilon(steps=0) >= only).all()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_many_budgets(accountant):
    epsilon = np.exp(np.random.default_rng(1).uniform(np.log(0.3), np.log(8), 3000))
    owners = ow.Owners(np.arange(3000), epsilon, DELTA)
    plan = ow.plan(
        owners, steps=50, batch_size=150, statistics=ow.ColumnStatistics(), accountant=accountant
    )
    ratio = plan.epsilon() / epsilon
    assert ratio.max() <= 1
    assert ratio.min() > 0.99


def test_it_is_stored_hashed_and_verified(tmp_path):
    plan = make()
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.opening_std == plan.opening_std
    assert "column statistics of all records before training" in plan.describe()
    with pytest.raises(ow.PlanError, match="spend"):
        dataclasses.replace(plan, opening_std=plan.opening_std / 3).verified()
    with pytest.raises(ow.PlanError, match="expected a finite number above 0"):
        dataclasses.replace(plan, opening_std=-1.0).verified()
    assert dataclasses.replace(plan, opening_std=None).hash != plan.hash


def test_requests_that_are_refused():
    owners = ow.Owners(np.arange(100), np.ones(100), DELTA)
    sizes = {"steps": 5, "batch_size": 10}
    with pytest.raises(ow.PlanError, match="statistics=3: expected a release before training"):
        ow.plan(owners, statistics=3, **sizes)
    half = {"statistics": ow.ColumnStatistics(0.5), "calibration": ow.Calibration(share=0.5)}
    with pytest.raises(ow.PlanError, match=r"the shares 0\.5 and 0\.5 .* less than 1 together"):
        ow.plan(owners, **half, **sizes)


def test_the_cost_of_a_release():
    release = OpeningRelease(3.0)
    assert release.multiplier(2) == 1.5
    assert OpeningRelease(3.0, together=True).multiplier(2) == 3.0
    assert RunCost(Schedule.constant(1)).without_sampling(1.0) == math.inf
    for std in (0.0, math.inf, math.nan):
        with pytest.raises(AccountingError, match="opening release std"):
            OpeningRelease(std)
