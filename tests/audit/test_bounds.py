"""Lower bounds: published values, a brute-force comparison, and soundness of an ideal attack."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

import ownerwise as ow
from ownerwise.audit.bounds import (
    Guesses,
    by_curve,
    chance,
    consistent,
    gaussian_estimate,
    guess,
    theorem,
)
from ownerwise.audit.trade_off import TradeOff

DELTA = 1e-5


def one_step(epsilon: float) -> ow.Plan:
    owners = ow.Owners(None, np.full(100, epsilon), DELTA)
    return ow.plan(owners, steps=1, batch_size=100)


@pytest.fixture(scope="module")
def curves():
    """The curves of one Gaussian step with epsilon 2, by the factor on its noise."""
    plan, known = one_step(2.0), {}

    def curve_at(noise: float) -> TradeOff:
        if noise not in known:
            known[noise] = TradeOff.of(plan, 0, noise)
        return known[noise]

    return curve_at


@pytest.mark.parametrize(
    ("guesses", "bound"),
    [((1000, 100, 90), 1.6261), ((1000, 100, 98), 2.7110), ((1000, 100, 99), 3.0034),
     ((1000, 100, 100), 3.4654), ((1000, 1000, 700), 0.7317), ((5000, 500, 450), 1.9414)],
)  # fmt: skip
def test_the_theorem_gives_known_bounds(guesses, bound):
    assert theorem(Guesses(*guesses), DELTA, 0.05) == pytest.approx(bound, abs=1e-3)


def test_without_delta_the_chance_is_binomial():
    for right in (0, 30, 70, 100):
        expected = binom.sf(right - 1, 100, 1 / (1 + math.exp(-1.0)))
        assert chance(Guesses(500, 100, right), 1.0, 0.0) == pytest.approx(expected, rel=1e-12)


def test_the_chance_falls_with_right_guesses_and_grows_with_epsilon():
    by_right = [chance(Guesses(500, 50, right), 1.0, DELTA) for right in range(51)]
    assert all(np.diff(by_right) <= 1e-15)
    by_epsilon = [chance(Guesses(500, 50, 40), epsilon, DELTA) for epsilon in np.arange(0, 5, 0.2)]
    assert all(np.diff(by_epsilon) >= -1e-15)


def test_a_run_that_releases_nothing_is_only_rejected_if_a_coin_would_be():
    """The recursion is at least as strict as the binomial tail of fair coins."""
    nothing = TradeOff(np.zeros(1), np.zeros(1))
    for right in range(50, 101):
        if binom.sf(right - 1, 100, 0.5) > 0.05:
            assert consistent(Guesses(1000, 100, right), nothing, 0.05)
    assert not consistent(Guesses(1000, 100, 75), nothing, 0.05)


def test_bounds_of_an_ideal_attack_are_sound_and_the_curve_is_the_stronger(curves):
    """True epsilon 2: each bound exceeds it in at most 5% of 80 runs (p < 1e-3 for 12)."""
    draws = np.random.default_rng(0)
    mu = 1 / float(one_step(2.0).noise_multipliers[0])
    found = []
    for _ in range(80):
        included = draws.integers(0, 2, 1000).astype(bool)
        made = guess(draws.normal(size=1000) + mu * included, included)
        found.append((theorem(made, DELTA, 0.05), by_curve(made, curves, DELTA, 0.05)))
    any_mechanism, curve = np.array(found).T
    assert (any_mechanism > 2.0).sum() < 12
    assert (curve > 2.0).sum() < 12
    assert np.median(any_mechanism) == pytest.approx(0.65, abs=0.15)
    assert np.median(curve) > 1.2 * np.median(any_mechanism)


def test_a_guess_for_every_canary_and_ties():
    included = np.array([True, False, True, False])
    assert guess(np.array([2.0, 0.0, 3.0, 1.0]), included, share=1.0) == (4, 4, 4)
    assert guess(np.zeros(4), included, share=1.0).right in range(5)


@pytest.mark.parametrize("count", range(2, 12))
def test_no_canary_is_guessed_twice(count):
    included = np.arange(count) % 2 == 0
    made = guess(np.arange(count), included, share=1.0)
    assert made.made == count // 2 * 2
    assert guess(np.where(included, 1.0, 0.0), included, share=1.0).right == made.made


def test_the_estimate_is_near_the_truth_and_never_negative():
    draws = np.random.default_rng(1)
    included = draws.integers(0, 2, 20_000).astype(bool)
    noise = draws.normal(size=20_000)
    mu = 1 / float(one_step(2.0).noise_multipliers[0])
    found = gaussian_estimate(3 * (noise + mu * included), included, DELTA, 1e-4)
    assert found.low < 2.0 < found.high
    assert found.value == pytest.approx(2.0, rel=0.1)
    assert gaussian_estimate(noise - included, included, DELTA, 0.05).value == 0.0


def test_the_curve_of_a_gaussian_is_known(curves):
    mu = 1 / float(one_step(2.0).noise_multipliers[0])
    rates = np.array([1e-4, 0.01, 0.3, 0.9])
    exact = norm.cdf(norm.ppf(rates) + mu)
    power = curves(1.0).power(rates)
    assert np.all(power >= exact - 1e-12)
    assert np.all(power <= exact * 1.003)
    assert norm.cdf(mu / 2**0.5) <= curves(1.0).area <= norm.cdf(mu / 2**0.5) + 2e-3
    assert norm.cdf(mu / 2) <= curves(1.0).accuracy <= norm.cdf(mu / 2) + 1e-4
    for rate, detected in zip(rates, power, strict=True):
        assert curves(1.0).false_alarms(float(detected)) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_a_curve_states_the_epsilon_of_its_plan(epsilon):
    plan = one_step(epsilon)
    assert TradeOff.of(plan, 0).epsilon(DELTA) == pytest.approx(plan.epsilon()[0], rel=2e-3)


def test_more_noise_lowers_the_curve(curves):
    areas = [curves(noise).area for noise in (0.5, 1.0, 2.0, 8.0)]
    assert areas == sorted(areas, reverse=True)
