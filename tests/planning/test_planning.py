"""Plans against the papers' printed figures, and against accountants that did not make them."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ownerwise as ow
from ownerwise.accounting import (
    Budgets,
    Exposure,
    RunCost,
    Schedule,
    multiplier_curve,
    pld,
    reference,
    sampling_rate_curve,
)
from ownerwise.planning import (
    METHODS,
)
from ownerwise.planning.solver import (
    SAFETY,
)
from tools.oracles import exact_rdp_epsilon, prv_epsilon

SAMPLED = [method for method in METHODS if method != "individual"]
"""The methods that draw batches."""
SVHN = {"records": 73257, "steps": 2146, "clip_norm": 0.9}
CIFAR10 = {"records": 50000, "steps": 1465, "clip_norm": 0.4}
MAJORITY_MIDDLE, MAJORITY_STRICT = (0.34, 0.43, 0.23), (0.54, 0.37, 0.09)


def three_owners(records, shares):
    counts = [round(records * share) for share in shares]
    return ow.Owners(np.arange(3), [1.0, 2.0, 3.0], 1e-5, records=counts)


@pytest.mark.parametrize(
    ("data", "shares", "multipliers", "noise", "clips"),
    [
        (SVHN, MAJORITY_MIDDLE, (2.747, 1.589, 1.214), 1.713, (0.561, 0.970, 1.270)),
        (SVHN, MAJORITY_STRICT, (2.747, 1.589, 1.214), 1.986, (0.651, 1.125, 1.472)),
        (CIFAR10, MAJORITY_MIDDLE, (3.294, 1.868, 1.399), 2.009, (0.244, 0.430, 0.574)),
        (CIFAR10, MAJORITY_STRICT, (3.294, 1.868, 1.399), 2.346, (0.285, 0.502, 0.671)),
    ],
)
def test_idp_sgd_table_6_scale(data, shares, multipliers, noise, clips):
    """Within 1.5%; sigma_scale as corrected (harmonic mean; the printed one contradicts C_o)."""
    owners = three_owners(data["records"], shares)
    plan = ow.plan(
        owners, "scale", steps=data["steps"], batch_size=1024, clip_norm=data["clip_norm"],
        accountant="rdp",
    )  # fmt: skip
    np.testing.assert_allclose(plan.noise_multipliers, multipliers, rtol=0.015)
    np.testing.assert_allclose(plan.noise_std / data["clip_norm"], noise, rtol=0.015)
    np.testing.assert_allclose(plan.clip_norms, clips, rtol=0.015)
    average = plan.clip_norms @ plan.records / plan.records.sum()
    assert average == pytest.approx(data["clip_norm"], rel=1e-9)
    assert plan.expected_batch_size == 1024


@pytest.mark.parametrize(
    ("data", "shares", "noise", "rates"),
    [
        (SVHN, MAJORITY_MIDDLE, 1.667, (0.008, 0.015, 0.021)),
        (SVHN, MAJORITY_STRICT, 1.937, (0.009, 0.018, 0.025)),
        (CIFAR10, MAJORITY_MIDDLE, 1.965, (0.012, 0.022, 0.031)),
        (CIFAR10, MAJORITY_STRICT, 2.300, (0.014, 0.026, 0.037)),
    ],
)
def test_idp_sgd_table_6_sample(data, shares, noise, rates):
    """Noise within 1.5%, rates as printed, to three digits.

    Ten of the twelve lie within half of the last digit. Two, for epsilon 3 at 54/37/9%, are
    .02562 and .03753 here and .025 and .037 in print; the same search with Opacus' grid of orders
    also gives .02562 and .03754, so the printed ones are not rounded.
    """
    owners = three_owners(data["records"], shares)
    plan = ow.plan(
        owners, "sample", steps=data["steps"], batch_size=1024, clip_norm=data["clip_norm"],
        accountant="rdp",
    )  # fmt: skip
    np.testing.assert_allclose(plan.noise_std / data["clip_norm"], noise, rtol=0.015)
    strict_majority = shares == MAJORITY_STRICT
    tolerance = [0.0005, 0.0005, 0.00065 if strict_majority else 0.0005]
    assert (np.abs(plan.sampling_rates - rates) <= tolerance).all()
    assert plan.sampling_rates @ plan.records == pytest.approx(1024, rel=1e-12)


def test_ino_sgd_appendix_c11_values():
    """delta 1e-5, 1000 steps, noise 4: eps .6 -> rate .0189, eps 8 -> .1935; rate .05, eps .5 ->
    clip norm .328. (Its "eps 3 -> 3.29" is not reproduced: 1.589.)"""
    run = RunCost(Schedule.constant(1000), "rdp")
    budgets = Budgets(np.array([0.6, 8.0]), np.full(2, 1e-5))
    rates = sampling_rate_curve(budgets, lambda _, x: np.full(np.shape(x), np.log(4.0)), run)
    np.testing.assert_allclose(rates(budgets), [0.0189, 0.1935], rtol=5e-3)
    budgets = Budgets(np.array([0.5, 3.0]), np.full(2, 1e-5))
    clips = 4.0 / multiplier_curve(budgets, 0.05, run)(budgets)
    np.testing.assert_allclose(clips, [0.328, 1.589], rtol=3e-3)


@pytest.mark.parametrize(
    ("rate", "steps", "by_rdp", "by_pld"),
    [
        (512 / 60000, 9375, (3.4358, 1.9254, 1.4275), (3.1786, 1.8026, 1.3489)),
        (1024 / 73257, 2146, (2.7540, 1.5923, 1.2165), (2.5502, 1.4948, 1.1526)),
        (1024 / 50000, 1465, (3.2989, 1.8699, 1.4006), (3.0497, 1.7493, 1.3215)),
    ],
)
def test_multipliers_of_both_accountants(rate, steps, by_rdp, by_pld):
    """Within 0.1% of figures computed with dp-accounting 0.6.0."""
    budgets = Budgets(np.array([1.0, 2.0, 3.0]), np.full(3, 1e-5))
    schedule = Schedule.constant(steps)
    for accountant, expected in (("rdp", by_rdp), ("pld", by_pld)):
        found = multiplier_curve(budgets, rate, RunCost(schedule, accountant))(budgets)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


BUDGET = st.tuples(
    st.floats(np.log(0.05), np.log(10)).map(np.exp).map(float),
    st.sampled_from([1e-5, 1e-6, 3e-7]),
    st.integers(50, 20000),
)


def check_safe_side(budgets, method, accountant, steps, share):
    """Assert the bands of the safe side for one random budget table."""
    epsilon, delta, records = map(np.array, zip(*budgets, strict=True))
    ids = np.arange(len(epsilon))
    owners = ow.Owners(ids, epsilon, delta, records=records)
    batch = share * records.sum()
    try:
        plan = ow.plan(owners, method, steps=steps, batch_size=batch, accountant=accountant)
    except ow.PlanError as error:  # RDP proves nothing for strict owners where noise is small
        if accountant != "rdp" or "too small for any" not in str(error):
            raise
        assume(False)
    assert plan.sampling_rates @ plan.records == pytest.approx(plan.expected_batch_size)
    assert (plan.epsilon() <= plan.targets).all()
    if method != "uniform":
        assert (plan.epsilon()[~plan.unspent] >= 0.995 * plan.targets[~plan.unspent]).all()
    bound_by_limits = plan.unspent | (method == "uniform")
    for owner in {int(np.argmin(epsilon)), int(np.argmax(epsilon))}:
        rate, multiplier = float(plan.sampling_rates[owner]), float(plan.noise_multipliers[owner])
        lowest = 0.0 if bound_by_limits[owner] else 0.995
        arguments = (rate, multiplier, steps, float(delta[owner]))
        exposure, run = Exposure(rate, multiplier), RunCost(plan.schedule)
        finer = reference.epsilon(run, exposure, float(delta[owner]), float(epsilon[owner]) / 4)
        assert finer <= epsilon[owner]
        if accountant == "pld":
            assert finer >= lowest * epsilon[owner]
            if 1e-3 < rate < 1:  # where Opacus' accountant is quick and exact
                assert lowest <= prv_epsilon(*arguments, epsilon[owner]) / epsilon[owner] <= 1.0
        else:
            assert lowest <= exact_rdp_epsilon(*arguments) / epsilon[owner] <= 1.0


TABLES = given(
    budgets=st.lists(BUDGET, min_size=1, max_size=6),
    method=st.sampled_from(SAMPLED),
    accountant=st.sampled_from(["pld", "rdp"]),
    steps=st.integers(20, 4000),
    share=st.floats(np.log(1e-3), np.log(0.3)).map(np.exp).map(float),
)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@TABLES
@settings(max_examples=15, derandomize=True, **COMMON)
def test_random_tables_end_on_the_safe_side(budgets, method, accountant, steps, share):
    """Pitfall 10: an accountant that did not make the plan finds every owner within budget."""
    check_safe_side(budgets, method, accountant, steps, share)


@pytest.mark.long
@TABLES
@settings(
    max_examples=int(os.environ.get("OWNERWISE_LONG_EXAMPLES", "200")), derandomize=False, **COMMON
)
def test_many_random_tables_end_on_the_safe_side(budgets, method, accountant, steps, share):
    check_safe_side(budgets, method, accountant, steps, share)


@pytest.fixture(scope="module")
def owners():
    ids = np.repeat(np.arange(4), [400, 300, 200, 100])
    return ow.Owners(ids, [0.5, 1.0, 2.0, 4.0], 1e-5)


def test_uniform_spends_the_strictest_budget_only(owners):
    plan = ow.plan(owners, "uniform", steps=200, batch_size=50)
    assert len(set(plan.sampling_rates)) == len(set(plan.clip_norms)) == 1
    spent = plan.epsilon()
    assert 0.995 * 0.5 <= spent[0] <= 0.5
    np.testing.assert_allclose(spent, spent[0])


def test_both_lies_between_sample_and_scale(owners):
    plans = {
        mixture: ow.plan(owners, "both", steps=200, batch_size=50, mixture=mixture)
        for mixture in (0.0, 0.5, 1.0)
    }
    sample = ow.plan(owners, "sample", steps=200, batch_size=50)
    scale = ow.plan(owners, "scale", steps=200, batch_size=50)
    np.testing.assert_allclose(plans[0.0].sampling_rates, sample.sampling_rates, rtol=1e-3)
    np.testing.assert_allclose(plans[1.0].clip_norms, scale.clip_norms, rtol=1e-3)
    np.testing.assert_allclose(plans[1.0].sampling_rates, scale.sampling_rates, rtol=2e-3)
    rates = [plan.sampling_rates for plan in plans.values()]
    assert rates[0][0] < rates[1][0] < rates[2][0]
    assert rates[0][3] > rates[1][3] > rates[2][3]
    clips = plans[0.5].clip_norms
    assert clips @ plans[0.5].records / 1000 == pytest.approx(1.0)
    np.testing.assert_allclose(  # proportional to the square root of scale's
        clips / clips[0], np.sqrt(scale.clip_norms / scale.clip_norms[0]), rtol=1e-3
    )


@pytest.mark.parametrize("method", SAMPLED)
def test_noise_given_finds_batch_or_steps(owners, method):
    """Two of noise, batch and steps give the third: there and back."""
    forth = ow.plan(owners, method, steps=200, batch_size=50)
    multiplier = forth.noise_std
    batch = ow.plan(owners, method, steps=200, noise_multiplier=multiplier)
    assert batch.expected_batch_size == pytest.approx(50, rel=3e-3)
    steps = ow.plan(owners, method, batch_size=50, noise_multiplier=multiplier)
    assert steps.steps == pytest.approx(200, abs=2)
    for plan in (batch, steps):
        assert plan.noise_std == multiplier
        assert (plan.epsilon() <= plan.targets).all()
        if method != "uniform":
            assert (plan.epsilon() >= 0.99 * plan.targets).all()


def test_more_steps_would_exceed_the_budgets(owners):
    plan = ow.plan(owners, "scale", batch_size=50, noise_multiplier=2.0)
    over = pld.epsilon(
        float(plan.sampling_rates[0]), float(plan.noise_multipliers[0]),
        Schedule.constant(round(plan.steps * 1.01)), 1e-5,
    )  # fmt: skip
    assert over > plan.targets[0]


def test_a_rate_is_capped_at_one_and_the_unspent_budget_reported(owners):
    plan = ow.plan(owners, "sample", steps=5, batch_size=600)
    assert plan.sampling_rates.max() <= 1
    assert plan.unspent.tolist() == [False, False, True, True]
    assert "cannot use up the whole budget" in plan.describe()
    with pytest.raises(
        ow.PlanError, match=r"2 of \d+ budgets cannot be used up.* owner 2 \(epsilon 2\)"
    ):
        ow.plan(owners, "sample", steps=5, batch_size=600, strict=True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"method": "sample", "steps": 5, "batch_size": 600}, "sampling rate would exceed 1"),
        ({"method": "uniform", "steps": 20, "batch_size": 50}, "the strictest owner needs"),
        ({"method": "uniform", "steps": 5, "noise_multiplier": 50.0}, "rate would exceed 1"),
        ({"method": "scale", "batch_size": 600, "noise_multiplier": 9.0}, "one more step"),
    ],
)
def test_a_strict_plan_says_why_a_budget_cannot_be_used_up(owners, arguments, reason):
    with pytest.raises(ow.PlanError, match=reason):
        ow.plan(owners, **arguments, strict=True, accountant="rdp")


def test_a_strict_plan_names_the_minimum_noise():
    owners = ow.Owners(np.repeat([0, 1], 500), {0: 1.0, 1: 900.0}, 1e-5)
    with pytest.raises(ow.PlanError, match=r"owner 1 .*noise multiplier would fall below 0\.2"):
        ow.plan(owners, "scale", steps=5, batch_size=50, strict=True, accountant="rdp")


def test_full_batches_are_plain_gaussian_mechanisms(owners):
    plan = ow.plan(owners, "sample", steps=20, batch_size=1000)
    assert (plan.sampling_rates == 1).all()
    gaussian = pld.epsilon(1.0, plan.noise_std, Schedule.constant(20), 1e-5)
    assert plan.epsilon()[0] == pytest.approx(gaussian, rel=1e-9)
    assert 0.995 * 0.5 < gaussian <= 0.5


def test_noise_schedules_compose_and_meet_the_targets(owners):
    segments = [(100, 1.0), (100, 0.7)]
    plan = ow.plan(owners, "sample", batch_size=50, noise_schedule=segments)
    assert plan.steps == 200
    assert plan.noise_std_at(99) == plan.noise_std
    assert plan.noise_std_at(100) == 0.7 * plan.noise_std
    assert (plan.epsilon() <= plan.targets).all()
    assert (plan.epsilon() >= 0.995 * plan.targets).all()
    assert plan.noise_std > ow.plan(owners, "sample", steps=200, batch_size=50).noise_std


def test_owners_with_equal_budgets_get_equal_parameters():
    """Pitfall 12: shuffling the owners shuffles the plan, nothing else."""
    epsilon = np.array([1.0, 3.0, 1.0, 0.5, 3.0])
    records = np.array([100, 200, 300, 400, 500])
    plan = ow.plan(ow.Owners(np.arange(5), epsilon, records=records), steps=100, batch_size=60)
    assert plan.sampling_rates[0] == plan.sampling_rates[2]
    assert plan.sampling_rates[1] == plan.sampling_rates[4]
    order = np.array([3, 1, 4, 0, 2])
    other = ow.plan(
        ow.Owners(np.arange(5), epsilon[order], records=records[order]), steps=100, batch_size=60
    )
    np.testing.assert_allclose(other.sampling_rates, plan.sampling_rates[order], rtol=1e-12)


def test_declared_counts_decide_and_real_ones_change_nothing():
    """Pitfall 25: neighbouring data sets give the identical plan."""
    declared = {0: 500, 1: 500}
    plans = []
    for real in ([500, 500], [499, 500], [3, 900]):
        ids = np.repeat([0, 1], real)
        with pytest.warns(ow.PrivacyWarning):
            owners = ow.Owners(ids, {0: 1.0, 1: 4.0}, 2e-3, records=declared)
        plans.append(ow.plan(owners, steps=50, batch_size=100))
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].hash == plans[1].hash == plans[2].hash


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 10}, "1 of steps, batch_size and noise_multiplier"),
        ({"steps": 10, "batch_size": 5, "noise_multiplier": 1.0}, "3 of steps"),
        ({"steps": 0, "batch_size": 5}, "steps 0: expected a whole number"),
        ({"steps": 10.5, "batch_size": 5}, "steps 10.5: expected a whole number"),
        ({"steps": 10, "batch_size": 1001}, "batch_size 1001: .*at most the 1000 declared"),
        ({"steps": 10, "batch_size": 0}, "batch_size 0: expected a number above 0"),
        ({"steps": 10, "batch_size": "x"}, "batch_size 'x': expected a number above 0"),
        ({"steps": 10, "batch_size": 5, "clip_norm": "x"}, "clip_norm 'x': expected 1e-06 to"),
        ({"steps": 10, "batch_size": float("nan")}, "batch_size nan"),
        ({"steps": 10, "batch_size": 5, "clip_norm": -1}, "clip_norm -1: expected 1e-06 to 1e"),
        ({"steps": 10, "noise_multiplier": float("inf")}, "noise_multiplier inf"),
        ({"steps": 10, "batch_size": 5, "method": "smaple"}, "did you mean 'sample'"),
        ({"steps": 10, "batch_size": 5, "accountant": "prv"}, "Known names: pld, rdp"),
        ({"steps": 10, "batch_size": 5, "release_share": "x"}, "release_share x: expected more"),
        ({"steps": 10, "noise_multiplier": "x"}, "noise_multiplier x: expected a positive"),
        ({"batch_size": 5, "noise_schedule": [(5.5, 1.0)]}, "noise_schedule .*whole number of"),
        ({"steps": 10, "batch_size": 5, "noise_schedule": 3}, "noise_schedule 3: expected a name"),
        ({"steps": 10, "batch_size": 5, "mixture": 0.5}, "only method='both'"),
        ({"steps": 10, "batch_size": 5, "method": "both", "mixture": 2}, "0 .sample. to 1"),
        (
            {"steps": 10, "batch_size": 5, "noise_schedule": [(5, 1.0)]},
            "5 steps; expected steps=10",
        ),
    ],
)
def test_bad_requests_say_what_would_work(owners, arguments, message):
    with pytest.raises(ow.PlanError, match=message):
        ow.plan(owners, **arguments)


def test_all_problems_of_a_request_are_listed(owners):
    with pytest.raises(ow.PlanError) as error:
        ow.plan(owners, "smaple", steps=-1, batch_size=1e9, clip_norm=0, accountant="x")
    assert len(error.value.problems) == 5


@pytest.mark.parametrize("epsilon", [1e-7, pytest.param(1e-9, marks=pytest.mark.long)])
def test_a_target_too_small_names_the_owner_and_what_would_work(epsilon):
    owners = ow.Owners(np.repeat([7, 8], 500), {7: epsilon, 8: 1.0}, 1e-5)
    with pytest.raises(ow.PlanError, match=r"owner 7: epsilon .* too small .* larger epsilon"):
        ow.plan(owners, steps=100, batch_size=50)


@pytest.mark.parametrize("method", ["uniform", "scale"])
def test_a_target_that_no_noise_meets_asks_for_a_smaller_batch(method):
    owners = ow.Owners(np.repeat([7, 8], 500), {7: 1e-7, 8: 1.0}, 1e-5)
    with pytest.raises(ow.PlanError, match=r"any noise multiplier .* a smaller batch") as error:
        ow.plan(owners, method, steps=100, batch_size=50)
    assert "larger batch" not in str(error.value)


def test_a_release_that_costs_too_much_asks_for_more_noise_on_it(owners):
    with pytest.raises(ow.PlanError, match="more noise on the release"):
        ow.plan(owners, "uniform", steps=200, batch_size=50, release_std=0.5, accountant="rdp")


def test_too_little_noise_is_refused(owners):
    with pytest.raises(ow.PlanError, match=r"noise_multiplier 0\.01 is too small"):
        ow.plan(owners, "scale", batch_size=500, noise_multiplier=0.01)


def test_rdp_with_little_noise_cannot_reach_a_strict_target():
    owners = ow.Owners(np.repeat([7, 8], 500), {7: 0.05, 8: 8.0}, 1e-5)
    with pytest.raises(ow.PlanError, match=r"owner 7: epsilon 0\.05 .* too small"):
        ow.plan(owners, steps=100, noise_multiplier=0.6, accountant="rdp")


def test_plans_keep_the_documented_safety_margin(owners):
    spent = ow.plan(owners, "scale", steps=200, batch_size=50).epsilon()
    assert (spent / owners.epsilon <= 1 - SAFETY / 2).all()


def test_uniform_plans_for_the_strictest_among_very_many_deltas():
    """Deltas of one cell of the grid differ: a larger epsilon with a smaller delta is stricter."""
    deltas = np.geomspace(1e-12, 1e-4, 2000)
    epsilon = np.full(2000, 8.0)
    cell = np.geomspace(1e-12, 1e-4, 65)[32:34]
    first, *_, last = np.flatnonzero((deltas >= cell[0]) & (deltas < cell[1]))
    epsilon[last], epsilon[first] = 1.0, 1.0001
    owners = ow.Owners(np.arange(2000), epsilon, deltas)
    made = ow.plan(owners, "uniform", steps=1000, batch_size=20)
    assert (made.epsilon() <= epsilon).all()
    assert made.epsilon()[first] > 0.98


@pytest.mark.parametrize("clip_norm", [1e-23, 1e20])
def test_clip_norms_whose_squares_float32_cannot_hold(clip_norm):
    owners = ow.Owners([0, 1], {0: 1.0, 1: 1.0}, delta=1e-5)
    with pytest.raises(ow.PlanError, match=r"clip_norm .*float32"):
        ow.plan(owners, steps=10, batch_size=1, clip_norm=clip_norm)
