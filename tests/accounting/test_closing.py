"""A release from all records after training, accounted for together with the sampled steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerwise import accounting
from ownerwise.accounting import (
    ClosingRelease,
    Exposure,
    PaidRelease,
    RunCost,
    Schedule,
    gaussian_mu,
    pld,
    rdp,
    reference,
)
from ownerwise.errors import AccountingError

DELTA = 1e-5


def by_dp_accounting(rate, multiplier, steps, closing, width=1e-4):
    options = {"value_discretization_interval": width}
    sampled = plds.from_gaussian_mechanism(multiplier, sampling_prob=rate, **options)
    once = plds.from_gaussian_mechanism(closing, **options)
    return sampled.self_compose(steps).compose(once).get_epsilon_for_delta(DELTA)


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "closing"),
    [(0.01, 1.0, 1000, 3.0), (0.1, 4.0, 200, 12.0), (0.002, 0.8, 2000, 40.0), (0.05, 2.0, 20, 1.0)],
)
def test_both_accountants_agree_with_dp_accounting(rate, multiplier, steps, closing):
    schedule = Schedule.constant(steps)
    theirs = by_dp_accounting(rate, multiplier, steps, closing)
    ours = pld.epsilon(rate, multiplier, schedule, DELTA, closing=closing)
    assert ours == pytest.approx(theirs, rel=5e-4)
    assert ours > pld.epsilon(rate, multiplier, schedule, DELTA)
    bound = rdp.epsilon(rate, multiplier, schedule, DELTA, closing=closing)
    assert ours <= bound <= 2 * ours
    checked = reference.epsilon(
        RunCost(schedule, closing=ClosingRelease(closing)), Exposure(rate, multiplier), DELTA, ours
    )
    assert checked == pytest.approx(ours, rel=5e-4)


def test_without_steps_it_is_the_gaussian_mechanism():
    """For records that are never sampled, and for a run that stopped before its first step."""
    mu = gaussian_mu(0.5, DELTA)
    for rate, steps in [(0.0, 100), (0.3, 0)]:
        schedule = Schedule.constant(steps)
        assert pld.epsilon(rate, 1.0, schedule, DELTA, closing=1 / mu) == pytest.approx(
            0.5, rel=2e-4
        )
        run = RunCost(schedule, closing=ClosingRelease(1 / mu))
        assert accounting.epsilon(rate, 1.0, run, DELTA)[0] == pytest.approx(0.5, rel=1e-3)
        assert reference.epsilon(run, Exposure(rate, 1.0), DELTA, 0.5) == pytest.approx(
            0.5, rel=1e-3
        )


def test_several_sums_are_one_gaussian_and_a_share_scales_it():
    schedule = Schedule.constant(50)
    exposure = Exposure(0.1, 2.0)
    three = RunCost(schedule, closing=ClosingRelease(9.0, 3)).epsilon(exposure, DELTA)
    one = RunCost(schedule, closing=ClosingRelease(9.0 / math.sqrt(3))).epsilon(exposure, DELTA)
    assert three == pytest.approx(one, rel=1e-12)
    half = RunCost(schedule, closing=ClosingRelease(4.5, 3))
    assert half.epsilon(exposure._replace(closing=0.5), DELTA) == pytest.approx(three, rel=1e-12)
    none = half.epsilon(exposure._replace(closing=0.0), DELTA)
    assert none == RunCost(schedule).epsilon(exposure, DELTA)


def test_together_with_a_laplace_release():
    """Composed in dp-accounting from the two parts, and above either part alone."""
    schedule, exposure = Schedule.constant(100), Exposure(0.05, 2.0)
    run = RunCost(schedule, "pld", PaidRelease(3.0, "laplace"), ClosingRelease(4.0))
    ours = run.epsilon(exposure, DELTA)
    assert ours == pytest.approx(reference.epsilon(run, exposure, DELTA, ours), rel=1e-3)
    assert ours > RunCost(schedule, "pld", PaidRelease(3.0, "laplace")).epsilon(exposure, DELTA)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(-3, -0.3), st.floats(-0.3, 1.0), st.integers(1, 3000), st.floats(0.0, 2.0),
    st.sampled_from(["pld", "rdp"]),
)  # fmt: skip
def test_it_never_costs_less_than_nothing_nor_falls_with_less_noise(
    log_rate, log_multiplier, steps, log_closing, accountant
):
    exposure = Exposure(10**log_rate, 10**log_multiplier)
    costs = [
        RunCost(Schedule.constant(steps), accountant, closing=closing).epsilon(exposure, DELTA)
        for closing in (
            None,
            ClosingRelease(2 * 10**log_closing),
            ClosingRelease(10**log_closing),
        )
    ]
    assert costs[0] <= costs[1] * (1 + 2e-4)
    assert costs[1] <= costs[2] * (1 + 2e-4)


def test_many_owners_with_shares_of_their_own():
    """Interpolated values are never below, and hardly above, those of each owner alone."""
    rng = np.random.default_rng(3)
    rates = np.sort(np.exp(rng.uniform(np.log(0.002), np.log(0.05), 3000)))
    shares = np.minimum(1.0, (rates / rates[1500]) ** 0.9)
    run = RunCost(Schedule.constant(500), "rdp", closing=ClosingRelease(6.0, 3))
    everyone = accounting.epsilon(rates, 1.3, run, DELTA, 1.0, shares)
    for at in rng.integers(0, 3000, 25):
        alone = run.epsilon(Exposure(float(rates[at]), 1.3, 1.0, float(shares[at])), DELTA)
        assert alone * (1 - 1e-6) <= everyone[at] <= alone * (1 + 6e-4)


def test_a_strict_budget_contributes_in_proportion_to_its_mu():
    release = ClosingRelease(10.0, 3, full_mu=gaussian_mu(1.0, DELTA))
    assert release.sensitivity(2.0, DELTA) == release.sensitivity(1.0, DELTA) == 1.0
    half = release.sensitivity(0.5, DELTA)
    assert half == pytest.approx(gaussian_mu(0.5, DELTA) / gaussian_mu(1.0, DELTA), rel=1e-4)


@pytest.mark.parametrize("epsilon", [0.4, 1.0, 3.0, 8.0, 20.0])
def test_with_a_pull_the_first_sum_has_lengths_of_its_own(epsilon):
    """Composed in dp-accounting from the steps and every sum by itself."""
    full, largest, count = gaussian_mu(1.0, DELTA), gaussian_mu(8.0, DELTA), 4
    release = ClosingRelease(1.7, count, full, largest)
    mu = gaussian_mu(epsilon, DELTA)
    share, pull = release.lengths(mu)
    assert share == pytest.approx(min(mu, full) / largest)
    assert pull == pytest.approx(min(mu, largest) / largest)
    options = {"value_discretization_interval": 1e-4}
    composed = plds.from_gaussian_mechanism(2.0, sampling_prob=0.1, **options).self_compose(50)
    for length in (pull, *[share] * (count - 1)):
        composed = composed.compose(plds.from_gaussian_mechanism(1.7 / length, **options))
    exposure = Exposure(0.1, 2.0, closing=release.sensitivity(epsilon, DELTA))
    run = RunCost(Schedule.constant(50), closing=release)
    theirs = composed.get_epsilon_for_delta(DELTA)
    assert run.epsilon(exposure, DELTA) == pytest.approx(theirs, rel=5e-4)


def test_a_pull_costs_every_owner_at_most_the_share_of_the_strictest():
    """Lax owners pay for their larger weights, but not a larger part of their budgets."""
    share, count, full, largest = 0.1, 3, gaussian_mu(0.5, DELTA), gaussian_mu(10.0, DELTA)
    std = math.sqrt(count / share) / full
    release = ClosingRelease(std * full / largest, count, full, largest)
    for epsilon in np.geomspace(0.5, 10.0, 9):
        spent = 1 / release.multiplier(release.sensitivity(float(epsilon), DELTA))
        assert spent**2 <= share * gaussian_mu(float(epsilon), DELTA) ** 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ((0.0, 1), "std 0: expected"), ((math.inf, 1), "std inf"), ((1.0, 0), "0 closing releases"),
        ((1.0, 1, -1.0), "full_mu -1"), ((1.0, 1, math.nan), "full_mu nan"),
        ((1.0, 2, 1.0, -1.0), "pull_mu -1"), ((1.0, 2, 0.0, 1.0), "full_mu 0 with pull_mu 1"),
        ((1.0, 2, 2.0, 1.0), "full_mu 2 with pull_mu 1"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(values, match):
    with pytest.raises(AccountingError, match=match):
        ClosingRelease(*values)
    with pytest.raises(AccountingError, match="closing sensitivity"):
        accounting.epsilon(0.1, 1.0, 10, DELTA, 1.0, 1.5)
