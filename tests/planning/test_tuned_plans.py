"""Plans of a search: the whole search stays within every budget, by two accountants."""

from dataclasses import replace

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.accounting import RunLaw
from ownerwise.planning.request import PlanRequest
from ownerwise.planning.tuned_plans import MOST_LEVELS, tuned_plans
from ownerwise.planning.tuning import Rival, Tuning, tail_probability

RNG = np.random.default_rng(0)
IDS_OF_MANY = RNG.integers(0, 60, 6000)
OWNERS = ow.Owners(IDS_OF_MANY, {at: (1.0, 2.0, 4.0)[at % 3] for at in range(60)})
SHORT, LONG = PlanRequest(steps=100, batch_size=600), PlanRequest(steps=300, batch_size=500)
SCALED = PlanRequest(method="scale", steps=100, batch_size=600, clip_norm=0.5)


def alone(plan):
    """Return what a single run of a search's plan costs."""
    return replace(plan, tuning=None).epsilon()


@pytest.mark.parametrize("law", ["logarithmic", "geometric", "poisson"])
def test_the_whole_search_spends_the_budgets_and_no_more(law):
    plans = tuned_plans(OWNERS, [SHORT, SHORT], RunLaw(law, 6.0))
    for plan in plans:
        share = plan.epsilon() / OWNERS.epsilon
        assert share.max() <= 1
        assert share.min() >= 0.98
        assert (alone(plan) < 0.8 * plan.epsilon()).all()
        checked = plan.verify()  # dp-accounting's RepeatAndSelectDpEvent
        assert "RepeatAndSelect" in checked.accountant
        assert 0.95 < checked.lowest_ratio <= checked.highest_ratio <= 1
    assert plans[0] == plans[1]
    assert np.array_equal(plans[0].targets, OWNERS.epsilon)
    assert plans[0].epsilon(steps=1) is not None
    assert np.array_equal(plans[0].epsilon(steps=0), plans[0].epsilon())  # one lump


def test_candidates_pay_for_the_dearest_at_each_order():
    """The base cost is the largest over the candidates per order: each alone would spend less."""
    law = RunLaw("geometric", 6.0)
    plans = tuned_plans(OWNERS, [SHORT, LONG, SCALED], law)
    assert len(plans[0].tuning.rivals) == 3
    totals = [plan.epsilon() for plan in plans]
    assert all(np.array_equal(total, totals[0]) for total in totals)
    assert (totals[0] <= OWNERS.epsilon).all()
    for plan in plans:
        single = Tuning(law, (plan.rival,)).epsilon(plan.accounted_deltas)
        assert (single <= totals[0] * (1 + 1e-9)).all()


def test_a_paid_score_and_runs_that_are_always_made_cost_more():
    law = RunLaw("poisson", 4.0)
    free, paid, fixed = (
        tuned_plans(OWNERS, [SHORT], law, **more)[0]
        for more in ({}, {"score_std": 20.0}, {"always_run": True})
    )
    assert (alone(paid) < alone(free)).all()
    assert (alone(fixed) <= alone(free) * 1.005).all()
    assert fixed.tuning.most >= law.most(tail_probability(OWNERS.epsilon, OWNERS.delta))
    few = replace(fixed, tuning=replace(fixed.tuning, most=fixed.tuning.most - 3))
    with pytest.raises(ow.PlanError, match="always made"):
        few.verify()


def test_every_owner_of_many_stays_within_their_own_budget():
    owners = ow.Owners(None, np.random.default_rng(1).uniform(1.0, 3.0, 3000))
    plan = tuned_plans(owners, [PlanRequest(steps=100, batch_size=600)], RunLaw("geometric", 5.0))[
        0
    ]
    share = plan.epsilon() / owners.epsilon
    assert share.max() <= 1
    assert share.min() > 0.95  # rounding down to levels costs a little
    assert len(np.unique(plan.sampling_rates)) <= MOST_LEVELS


@pytest.mark.parametrize("sampling", ["owner", "record"])
def test_whole_owners_are_protected(sampling):
    owners = ow.Owners(np.repeat(np.arange(40), 3), {at: (1.0, 4.0)[at % 2] for at in range(40)})
    request = PlanRequest(unit="owner", sampling=sampling, steps=20, batch_size=8)
    plan = tuned_plans(owners, [request], RunLaw("geometric", 3.0), score_std=30.0)[0]
    assert (plan.epsilon() <= owners.epsilon).all()
    assert np.array_equal(plan.owner_epsilon(), plan.epsilon())


def test_all_records_of_an_owner_are_charged_for_the_search():
    owners = ow.Owners(np.repeat(np.arange(40), 3), {at: (0.2, 1.0)[at % 2] for at in range(40)})
    law, request = RunLaw("geometric", 3.0), PlanRequest(steps=20, batch_size=30)
    plan = tuned_plans(owners, [request], law, score_std=200.0, score_records=2)[0]
    several = plan.owner_epsilon()
    one_run = replace(plan, tuning=None).owner_epsilon()
    assert (several > np.maximum(plan.epsilon(), one_run)).all()
    fewer = replace(plan, tuning=replace(plan.tuning, score_records=1)).owner_epsilon()
    assert (fewer < several).all()


def test_hardened_plans_and_other_releases():
    request = PlanRequest(
        steps=100, batch_size=600, hardened=True, statistics=ow.ColumnStatistics()
    )
    plan = tuned_plans(OWNERS, [request], RunLaw("geometric", 3.0))[0]
    single = replace(plan, tuning=None)
    assert plan.overflow_probability < single.overflow_probability / 3
    assert plan.hardened_rows >= single.hardened_rows
    assert (plan.epsilon() <= OWNERS.epsilon).all()
    assert plan.opening_std is not None
    adaptive = PlanRequest(steps=100, batch_size=600, clip_norm="adaptive")
    assert tuned_plans(OWNERS, [adaptive], RunLaw("geometric", 3.0))[0].release_std is not None


def test_a_budget_that_cannot_pay_for_any_choice_is_refused():
    owners = ow.Owners(IDS_OF_MANY, {at: (0.3, 2.0, 8.0)[at % 3] for at in range(60)})
    with pytest.raises(ow.PlanError, match=r"owner with epsilon 0\.3, however little each run"):
        tuned_plans(owners, [PlanRequest(steps=60, batch_size=100)], RunLaw("logarithmic", 6.0))


def test_a_stored_plan_is_the_same_and_a_changed_one_is_refused(tmp_path):
    plan = tuned_plans(OWNERS, [SHORT, LONG], RunLaw("logarithmic", 4.0), score_std=25.0)[1]
    plan.save(tmp_path / "plan.json")
    loaded = ow.Plan.load(tmp_path / "plan.json", OWNERS)
    assert loaded == plan
    assert np.array_equal(loaded.epsilon(), plan.epsilon())
    assert loaded.verified() == plan
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"runs": 4.0', '"runs": 2.0'))
    with pytest.raises(ow.PlanError, match="changed after it was saved"):
        ow.Plan.load(tmp_path / "plan.json")


def test_a_plan_that_understates_its_search_is_refused():
    plan = tuned_plans(OWNERS, [SHORT], RunLaw("geometric", 4.0))[0]
    more = replace(plan, tuning=replace(plan.tuning, law=RunLaw("geometric", 40.0)))
    with pytest.raises(ow.PlanError, match="spend more than budgeted"):
        more.verify()
    cheap = Rival(plan.run_cost, (plan.sampling_rates / 2, *plan.exposures[1:]))
    with pytest.raises(ow.PlanError, match="own cost is not among"):
        replace(plan, tuning=replace(plan.tuning, rivals=(cheap,))).verify()


def test_all_problems_of_all_candidates_are_listed():
    requests = [
        PlanRequest(steps=0, batch_size=50),
        PlanRequest(batch_size=50, noise_multiplier=2.0),
        PlanRequest(steps=10, batch_size=50, release_noise="laplace", release_std=2.0),
        PlanRequest(steps=10, batch_size=50, hardened=True),
    ]
    with pytest.raises(ow.PlanError) as caught:
        tuned_plans(OWNERS, requests, RunLaw("geometric", 4.0))
    text = "\n".join(caught.value.problems)
    for part in ("steps 0", "noise_multiplier 2.0 in a search", "laplace", "hardened differs"):
        assert part in text
