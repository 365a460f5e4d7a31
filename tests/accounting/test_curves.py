from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerwise import accounting
from ownerwise.accounting import (
    Budgets,
    RunCost,
    Schedule,
    find_root,
    gaussian_mu,
    multiplier_curve,
    pld,
    rdp,
    sampling_rate_curve,
)
from ownerwise.errors import AccountingError

SCHEDULE = Schedule.constant(400)
BY_RDP = RunCost(SCHEDULE, "rdp")


def random_budgets(count, deltas, seed=0):
    rng = np.random.default_rng(seed)
    return Budgets(np.exp(rng.uniform(np.log(0.1), np.log(10), count)), rng.choice(deltas, count))


def test_interpolated_rates_spend_the_budget_between_the_nodes():
    """Owners drawn at random lie between the nodes; the accountant is asked at each directly."""
    budgets = random_budgets(3000, [1e-5, 1e-6])
    curve = sampling_rate_curve(
        budgets, lambda _, x: np.full(np.shape(x), np.log(1.3)), RunCost(SCHEDULE)
    )
    rates = curve(budgets)
    delta = np.empty(3000)
    for group in budgets.groups:
        delta[group.members] = group.delta
    for owner in np.random.default_rng(1).choice(3000, 25, replace=False):
        spent = pld.epsilon(float(rates[owner]), 1.3, SCHEDULE, float(delta[owner]))
        assert spent == pytest.approx(budgets.epsilon[owner], rel=6e-4)
    everyone = accounting.epsilon(rates, 1.3, SCHEDULE, delta)
    np.testing.assert_allclose(everyone, budgets.epsilon, rtol=8e-4)


def test_interpolated_multipliers_spend_the_budget_between_the_nodes():
    budgets = random_budgets(3000, [1e-5])
    multipliers = multiplier_curve(budgets, 0.02, BY_RDP)(budgets)
    assert (np.diff(multipliers[np.argsort(budgets.epsilon)]) < 0).all()
    for owner in range(0, 3000, 150):
        spent = rdp.epsilon(0.02, float(multipliers[owner]), SCHEDULE, 1e-5)
        assert spent == pytest.approx(budgets.epsilon[owner], rel=6e-4)


def test_the_cap_at_rate_one_is_met_sharply():
    """Where a rate would exceed 1 it is 1; just below the kink budgets are still spent."""
    budgets = random_budgets(2000, [1e-5])
    curve = sampling_rate_curve(budgets, lambda _, x: np.full(np.shape(x), np.log(25.0)), BY_RDP)
    rates = curve(budgets)
    limit = rdp.epsilon(1.0, 25.0, SCHEDULE, 1e-5)
    assert rates.max() <= 1.0
    assert (rates[budgets.epsilon > 1.01 * limit] == 1.0).all()
    inside = budgets.epsilon < 0.999 * limit
    spent = accounting.epsilon(rates[inside], 25.0, BY_RDP, 1e-5)
    np.testing.assert_allclose(spent, budgets.epsilon[inside], rtol=2e-3)
    assert (spent <= budgets.epsilon[inside] * 1.0008).all()


def test_epsilon_rounds_up_along_a_chain():
    rates = np.geomspace(1e-3, 0.2, 500)
    multipliers = np.geomspace(3.0, 1.0, 500)
    many = accounting.epsilon(rates, multipliers, SCHEDULE, 1e-5)
    for at in range(3, 500, 31):
        direct = pld.epsilon(float(rates[at]), float(multipliers[at]), SCHEDULE, 1e-5)
        assert direct * (1 - 1e-5) <= many[at] <= direct * 1.0006


def staircase(steps, legs):
    """Rates and multipliers that cost more and more, round corners: either moves alone."""
    ends = np.linspace(0, 3.0, steps + 1)
    log_rates, log_multipliers = [], []
    for low, high in pairwise(ends):
        along = np.linspace(0, (high - low) / 2, legs, endpoint=False)
        log_rates += [np.full(legs, low / 2), low / 2 + along]
        log_multipliers += [-low / 2 - along, np.full(legs, -high / 2)]
    return 0.004 * np.exp(np.concatenate(log_rates)), 2.0 * np.exp(np.concatenate(log_multipliers))


def random_chain(seed):
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0.005, 0.03, 150)), np.sort(rng.uniform(0.7, 2, 150))[::-1]


@pytest.mark.parametrize(
    "chain", [staircase(22, 9), staircase(5, 40), random_chain(0), random_chain(1)], ids=range(4)
)
def test_epsilon_sees_corners_between_owners(chain):
    """Rising cost alone is no smooth curve: each owner must have what it has alone."""
    rates, multipliers = chain
    everyone = accounting.epsilon(rates, multipliers, BY_RDP, 1e-5)
    alone = [rdp.epsilon(r, m, SCHEDULE, 1e-5) for r, m in zip(rates, multipliers, strict=True)]
    assert (everyone >= np.array(alone) * (1 - 1e-9)).all()
    np.testing.assert_allclose(everyone, alone, rtol=5e-4)


def test_owners_at_one_place_with_other_shares_of_a_release():
    """Many points of one position: each by itself."""
    shares = np.linspace(0.2, 1.0, 60)
    run = RunCost(SCHEDULE, "rdp", accounting.PaidRelease(3.0))
    everyone = accounting.epsilon(0.02, 1.3, run, 1e-5, shares)
    alone = [float(accounting.epsilon(0.02, 1.3, run, 1e-5, s)[0]) for s in shares]
    np.testing.assert_allclose(everyone, alone, rtol=1e-12)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"delta": -1e-5}, "delta -1e-05: expected between 0 and 1"),
        ({"delta": 0.0}, "delta 0"),
        ({"delta": 1.0}, "delta 1"),
        ({"delta": np.nan}, "delta nan"),
        ({"sampling_rate": 1.5}, "rate 1.5: expected 0 to 1"),
        ({"sampling_rate": np.nan}, "rate nan"),
        ({"multiplier": 0.0}, "noise multiplier 0: expected above 0"),
        ({"multiplier": np.inf}, "noise multiplier inf"),
        ({"multiplier": 1e-3}, "noise multiplier 0.001: expected at least 0.02"),
        ({"release_sensitivity": 0.0}, "release sensitivity 0"),
        ({"sampling_rate": -0.1, "delta": np.array([1e-5, 2.0])}, "rate -0.1: .*; delta 2"),
    ],
)
def test_impossible_parameters_are_refused(accountant, given, words):
    usual = {
        "sampling_rate": 0.1,
        "multiplier": 1.0,
        "steps": RunCost(Schedule.constant(5), accountant),
        "delta": 1e-5,
    }
    with pytest.raises(AccountingError, match=words):
        accounting.epsilon(**usual | given)


@pytest.mark.parametrize(
    ("std", "noise"), [(0.0, "gaussian"), (-1.0, "laplace"), (np.nan, "gaussian"), (1.0, "poisson")]
)
def test_a_release_that_cannot_be_accounted_is_refused(std, noise):
    with pytest.raises(AccountingError, match="release"):
        accounting.PaidRelease(std, noise)


def test_epsilon_follows_the_owner_in_any_order():
    """Pitfall 12: equal parameters are merged, yet costs follow the owner, not the position."""
    rng = np.random.default_rng(0)
    rates = rng.choice([0.01, 0.02, 0.05], 200)
    multipliers = rng.choice([1.0, 2.0], 200)
    deltas = rng.choice([1e-5, 1e-6], 200)
    together = accounting.epsilon(rates, multipliers, BY_RDP, deltas)
    for at in range(0, 200, 17):
        alone = rdp.epsilon(float(rates[at]), float(multipliers[at]), SCHEDULE, float(deltas[at]))
        assert together[at] == pytest.approx(alone, rel=1e-12)
    shuffle = rng.permutation(200)
    shuffled = accounting.epsilon(rates[shuffle], multipliers[shuffle], BY_RDP, deltas[shuffle])
    np.testing.assert_array_equal(shuffled, together[shuffle])


def test_zero_rates_and_zero_steps_cost_nothing():
    assert (accounting.epsilon([0.0, 0.1], 1.0, 0, 1e-5) == 0).all()
    mixed = accounting.epsilon([0.0, 0.1], 1.0, 10, 1e-5)
    assert mixed[0] == 0
    assert mixed[1] > 0


def test_many_deltas_are_rounded_down_never_up():
    rng = np.random.default_rng(0)
    delta = 10 ** rng.uniform(-7, -5, 1000)
    budgets = Budgets(np.ones(1000), delta)
    assert len(budgets.groups) <= 64
    for group in budgets.groups:
        assert (group.delta <= delta[group.members]).all()
        assert (group.delta > delta[group.members] / 1.08).all()
    assert sum(len(group.members) for group in budgets.groups) == 1000


@given(st.floats(0.01, 20.0), st.floats(-25, -3))
@settings(max_examples=50, deadline=None)
def test_gaussian_mu_inverts_the_gaussian_mechanism(epsilon, log_delta):
    """One unsampled step of multiplier 1/mu costs exactly epsilon (Dong, Roth, Su 2022)."""
    delta = float(np.exp(log_delta))
    mu = gaussian_mu(epsilon, delta)
    spent = pld.epsilon(1.0, 1.0 / mu, Schedule.constant(1), delta)
    assert spent == pytest.approx(epsilon, rel=1e-3)


@given(
    slope=st.sampled_from([-1.0, 1.0]),
    root=st.floats(-5, 5),
    guess=st.floats(-10, 10),
    bend=st.floats(0.1, 5),
)
def test_find_root_finds_roots_of_bent_lines(slope, root, guess, bend):
    def function(x):
        return slope * np.sinh(bend * (x - root)) / bend

    found = find_root(function, guess, slope, -6.0, 6.0, 1e-9)
    assert abs(function(found)) <= 1e-9


def test_find_root_returns_the_bound_where_nothing_crosses():
    assert find_root(lambda x: x + 10, 0.0, 1.0, -2.0, 2.0, 1e-6) == -2.0
    assert find_root(lambda x: x - 10, 0.0, 1.0, -2.0, 2.0, 1e-6) == 2.0
    assert find_root(lambda x: 10 - x, 0.0, -1.0, -2.0, 2.0, 1e-6) == 2.0


def test_find_root_takes_the_lower_side_of_a_jump():
    """Pitfall 10: at a jump the side that spends less counts."""
    found = find_root(lambda x: 1.0 if x > 0.3 else -1.0, 0.9, 1.0, -2.0, 2.0, 1e-6)
    assert found <= 0.3
    assert found == pytest.approx(0.3, abs=1e-9)
    falling = find_root(lambda x: -1.0 if x > 0.3 else 1.0, 0.9, -1.0, -2.0, 2.0, 1e-6)
    assert falling > 0.3


def test_find_root_gives_up_loudly():
    with pytest.raises(AccountingError, match="not a number"):
        find_root(lambda x: float("nan"), 0.0, 1.0, -2.0, 2.0, 1e-6)
