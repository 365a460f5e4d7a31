"""The two accountants against each other, against dp-accounting and Opacus, and at the edges."""

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from ownerwise.accounting import (
    ACCOUNTANTS,
    Schedule,
    pld,
    rdp,
)
from ownerwise.accounting.dominating_pairs import GaussianPair
from ownerwise.errors import AccountingError
from tools.oracles import exact_rdp_epsilon, prv_epsilon

CASES = [  # rate, multiplier, steps, delta
    (0.01, 2.0, 2000, 1e-5),
    (0.002, 2.8, 1500, 1e-5),
    (1024 / 73257, 1.15, 2146, 1e-5),
    (512 / 60000, 3.18, 9375, 1e-6),
    (0.02, 1.0, 500, 1e-7),
    (0.3, 4.0, 1000, 1e-5),
    (1.0, 100.0, 1000, 1e-5),
    (1.0, 2.0, 1, 1e-5),
    (0.9, 3.0, 4, 1e-6),
    (1e-3, 0.5, 100, 1e-5),
]


@pytest.mark.parametrize(("rate", "multiplier", "steps", "delta"), CASES)
def test_pld_agrees_with_dp_accounting_at_another_grid(rate, multiplier, steps, delta):
    ours = pld.epsilon(rate, multiplier, Schedule.constant(steps), delta)
    accountant = PLDAccountant(value_discretization_interval=min(1e-4, 2e-3 * ours / steps**0.5))
    event = dp_event.GaussianDpEvent(multiplier)
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, event) if rate < 1 else event, steps)
    theirs = accountant.get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.parametrize(("rate", "multiplier", "steps", "delta"), CASES[:5])
def test_pld_agrees_with_opacus_prv(rate, multiplier, steps, delta):
    ours = pld.epsilon(rate, multiplier, Schedule.constant(steps), delta)
    assert ours == pytest.approx(prv_epsilon(rate, multiplier, steps, delta), rel=1.5e-3)


@pytest.mark.parametrize(("rate", "multiplier", "steps", "delta"), CASES)
def test_rdp_agrees_with_a_separate_one_and_lies_above_pld(rate, multiplier, steps, delta):
    schedule = Schedule.constant(steps)
    ours = rdp.epsilon(rate, multiplier, schedule, delta)
    assert ours == pytest.approx(exact_rdp_epsilon(rate, multiplier, steps, delta), rel=5e-4)
    assert ours > pld.epsilon(rate, multiplier, schedule, delta)


def test_strict_owner_is_not_ruined_by_a_sparse_grid_of_orders():
    """A sparse grid of orders leaves this owner a rate of .00032 instead of .00195 (RDP)."""
    schedule = Schedule.constant(1500)
    assert rdp.epsilon(0.00195, 2.816, schedule, 1e-5) == pytest.approx(0.1, rel=2e-3)
    assert pld.epsilon(0.00225, 2.816, schedule, 1e-5) == pytest.approx(0.1, rel=5e-3)


@given(
    rate=st.floats(1e-4, 1.0),
    multiplier=st.floats(0.4, 60.0),
    steps=st.integers(1, 20000),
    log_delta=st.floats(-20, -5),
)
@example(rate=1e-4, multiplier=0.4, steps=1, log_delta=-11.5)
@settings(max_examples=60, deadline=None)
def test_finer_grids_change_little_and_pld_stays_below_rdp(rate, multiplier, steps, log_delta):
    """The overstatement by the grid is what it is said to be, wherever epsilon is of use."""
    delta, schedule = float(np.exp(log_delta)), Schedule.constant(steps)
    ours = pld.epsilon(rate, multiplier, schedule, delta)
    bound = rdp.epsilon(rate, multiplier, schedule, delta)
    assert ours <= max(bound * (1 + 4e-3), pld.LEAST_EPSILON)
    if 0.01 < ours < 100:
        fine = pld.OVERSTATEMENT
        try:
            pld.OVERSTATEMENT = fine / 4
            finer = pld.epsilon(rate, multiplier, schedule, delta)
        finally:
            pld.OVERSTATEMENT = fine
        assert -2e-5 <= ours / finer - 1 <= 3e-4


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_is_monotone_in_steps_rate_noise_and_delta(accountant):
    """Pitfall 13: never 0, NaN or negative for a run that costs something; more costs more."""
    account = ACCOUNTANTS[accountant]
    base = account(0.01, 1.5, Schedule.constant(500), 1e-5)
    assert 0 < base < np.inf
    assert account(0.01, 1.5, Schedule.constant(600), 1e-5) > base
    assert account(0.012, 1.5, Schedule.constant(500), 1e-5) > base
    assert account(0.01, 1.6, Schedule.constant(500), 1e-5) < base
    assert account(0.01, 1.5, Schedule.constant(500), 1e-6) > base
    assert account(0.0, 1.5, Schedule.constant(500), 1e-5) == 0
    assert account(0.01, 1.5, Schedule.constant(0), 1e-5) == 0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_accountants_raise_rather_than_guess(accountant):
    """Pitfall 13: failure raises."""
    with pytest.raises((AccountingError, ValueError, FloatingPointError, ZeroDivisionError)):
        ACCOUNTANTS[accountant](0.01, 1e-200, Schedule.constant(5), 1e-5)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_heterogeneous_steps_compose(accountant):
    account = ACCOUNTANTS[accountant]
    whole = account(0.01, 1.5, Schedule.constant(500), 1e-5)
    split = account(0.01, 1.5, Schedule(((200, 1.0), (300, 1.0))), 1e-5)
    assert split == pytest.approx(whole, rel=1e-6)
    swapped = account(0.01, 1.0, Schedule(((300, 2.0), (200, 1.5))), 1e-5)
    mixed = account(0.01, 1.0, Schedule(((200, 1.5), (300, 2.0))), 1e-5)
    assert mixed == pytest.approx(swapped, rel=1e-6)
    assert account(0.01, 2.0, Schedule.constant(500), 1e-5) < mixed < whole


def test_decaying_noise_is_not_the_mean_multiplier():
    """q=512/60000, m 1.6 exp(-.02 e), 40 epochs: about 3.8, where the mean multiplier says 2.8."""
    epoch, rate = 117, 512 / 60000
    factors = np.exp(-0.02 * np.arange(40))
    decaying = Schedule(tuple((epoch, float(factor)) for factor in factors))
    assert pld.epsilon(rate, 1.6, decaying, 1e-5) == pytest.approx(3.8, abs=0.25)
    mean = pld.epsilon(rate, 1.6 * float(factors.mean()), Schedule.constant(40 * epoch), 1e-5)
    assert mean == pytest.approx(2.8, abs=0.2)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for factor in factors:
        gaussian = dp_event.GaussianDpEvent(1.6 * float(factor))
        accountant.compose(dp_event.PoissonSampledDpEvent(rate, gaussian), epoch)
    assert pld.epsilon(rate, 1.6, decaying, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=2e-3
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("multiplier", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
@pytest.mark.parametrize("removing", [False, True])
def test_either_direction_by_itself_is_safe(rate, multiplier, delta, removing):
    """One step: delta at the reported epsilon, by integration, is not above the one asked for."""
    step = pld.Segment(1, rate, GaussianPair(multiplier))
    found = pld._Direction([step], delta, removing=removing).epsilon()
    x = np.linspace(-12 * multiplier, 1 + 12 * multiplier, 400_001)
    without = norm.pdf(x, 0, multiplier)
    mixed = (1 - rate) * without + rate * norm.pdf(x, 1, multiplier)
    upper, lower = (mixed, without) if removing else (without, mixed)
    true = np.trapezoid(np.maximum(upper - np.exp(found) * lower, 0), x)
    assert true <= delta * (1 + 1e-6)
