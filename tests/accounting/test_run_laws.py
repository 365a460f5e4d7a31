"""The best of a random number of runs: exact enumeration, dp-accounting, and published figures."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from ownerwise.accounting import SHAPES, RunLaw, rdp, score_segment
from ownerwise.accounting.moments import log_moments
from ownerwise.accounting.run_laws import _SPACING as SPACING
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

LAWS = [(name, mean) for name in SHAPES for mean in (1.5, 4.0, 12.0)]
ORDERS = 1 + np.geomspace(0.02, 400, 300)
MOST = 3000


def best_of(law: RunLaw, one: np.ndarray) -> np.ndarray:
    """Return the exact law of the best of K draws from `one`, whose outputs are sorted by score.

    With no draw at all, a fixed output is released, which is appended.
    """
    counts = np.arange(MOST + 1)
    chances = law.probabilities(MOST)
    cumulative = np.append(0.0, np.cumsum(one))
    powers = np.minimum(cumulative, 1.0)[:, None] ** counts
    return np.append(np.diff(powers, axis=0) @ chances, chances[0])


def renyi(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the larger of both Renyi divergences at each order."""
    logs = [
        logsumexp(ORDERS[:, None] * np.log(p / q) + np.log(q), axis=1)
        for p, q in ((one, other), (other, one))
    ]
    return np.maximum(np.max(logs, axis=0), 0.0) / (ORDERS - 1)


def exact_delta(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """Return the smallest delta at which two laws are (epsilon, delta)-indistinguishable."""
    return max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
        for p, q in ((one, other), (other, one))
    )


laws_of_five = st.lists(st.floats(0.02, 1.0), min_size=5, max_size=5)


@pytest.mark.parametrize(("name", "mean"), LAWS)
@given(weights=laws_of_five, shifts=st.lists(st.floats(-0.7, 0.7), min_size=5, max_size=5))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_total_holds_for_enumerated_mechanisms(name, mean, weights, shifts):
    law = RunLaw(name, mean)
    one = np.array(weights) / sum(weights)
    other = one * np.exp(shifts)
    other /= other.sum()
    base = renyi(one, other)
    released = best_of(law, one), best_of(law, other)
    for delta in (1e-2, 1e-6):
        assert exact_delta(*released, law.epsilon(ORDERS, base, delta)) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("name", "mean"), LAWS)
def test_drawn_candidates_cost_the_largest_at_each_order(name, mean):
    """A run draws one of two mechanisms; the released output says which (settings are released)."""
    law, rng = RunLaw(name, mean), np.random.default_rng(7)
    for _ in range(20):
        parts, bases = [], []
        for _ in range(2):
            one = rng.dirichlet(np.ones(4)) * 0.9 + 0.025
            other = one * np.exp(rng.uniform(-0.5, 0.5, 4))
            one, other = one / one.sum(), other / other.sum()
            parts.append((one / 2, other / 2))
            bases.append(renyi(one, other))
        order = rng.permutation(8)  # scores of the two mechanisms' outputs interleave
        pair = [np.concatenate([part[side] for part in parts])[order] for side in (0, 1)]
        epsilon = law.epsilon(ORDERS, np.max(bases, axis=0), 1e-5)
        assert exact_delta(*(best_of(law, side) for side in pair), epsilon) <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_the_cost_of_a_single_run_would_be_too_small(name):
    """The enumeration above can fail: the best of many runs breaks what one run promises."""
    one, other, law = np.array([0.5, 0.5]), np.array([0.62, 0.38]), RunLaw(name, 20.0)
    promise = math.log(0.5 / 0.38)
    assert exact_delta(one, other, promise) < 1e-12
    released = best_of(law, one), best_of(law, other)
    assert exact_delta(*released, promise) > 1e-5
    assert exact_delta(*released, law.epsilon(ORDERS, renyi(one, other), 1e-5)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "expected"), [("logarithmic", 1.76), ("geometric", 2.12), ("poisson", 2.31)]
)
def test_ten_expected_runs_of_a_known_plan(name, expected):
    """One run has epsilon .998 (RDP); adding ten of them naively would give 3.5."""
    rate, multiplier, steps, delta = 512 / 60000, 2.496, 4687, 1e-5
    law = RunLaw(name, 10.0)
    parts = rdp.segments_of(rate, multiplier, Schedule.constant(steps))
    assert law.epsilon_of([parts], delta) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("name", "mean"), LAWS)
def test_dp_accounting_agrees(name, mean):
    law, rate, multiplier, steps, std = RunLaw(name, mean), 0.01, 2.0, 500, 30.0
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
    run = dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(step, steps), dp_event.GaussianDpEvent(std)]
    )
    event = dp_event.RepeatAndSelectDpEvent(run, mean, law.shape)
    parts = [*rdp.segments_of(rate, multiplier, Schedule.constant(steps)), score_segment(std)]
    excess = rdp.order_grid(rdp.highest_order(parts), SPACING)
    theirs = RdpAccountant(list(1 + excess)).compose(event).get_epsilon(1e-5)
    score = 1 / (2 * std**2)
    base = steps * log_moments(rate, multiplier, 1 + excess) / excess + (1 + excess) * score
    assert law.epsilon(1 + excess, base, 1e-5) == pytest.approx(theirs, rel=1e-5)
    assert law.epsilon_of([parts], 1e-5) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("name", "mean"), LAWS)
def test_the_law_has_its_mean_and_its_tail(name, mean):
    law = RunLaw(name, mean)
    chances = law.probabilities(MOST)
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert chances @ np.arange(MOST + 1) == pytest.approx(mean, rel=1e-9)
    assert (chances[0] > 0) == (name == "poisson")
    for probability in (1e-3, 1e-9):
        most = law.most(probability)
        assert chances[most + 1 :].sum() <= probability * (1 + 1e-6)
        assert chances[most // 2 :].sum() > probability  # not needlessly many


@pytest.mark.parametrize(("name", "mean"), LAWS)
def test_numbers_are_drawn_by_the_law(name, mean):
    law = RunLaw(name, mean)
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.array([law.number(float(u)) for u in uniforms])
    counts = np.bincount(drawn, minlength=MOST + 1)[: MOST + 1] / 20_000
    assert np.abs(counts - law.probabilities(MOST)).max() <= 1.01 / 20_000
    assert law.number(1 - 2.0**-53) <= law.most(2.0**-53)


@pytest.mark.parametrize(
    ("name", "mean"), [("normal", 3.0), ("geometric", 1.0), ("poisson", 0.5), ("poisson", True)]
)
def test_other_laws_are_refused(name, mean):
    with pytest.raises(AccountingError):
        RunLaw(name, mean)


def test_a_cost_that_is_not_finite_is_refused():
    """Trap 13: an accountant raises rather than returning a number."""
    for bad in (np.inf, np.nan, -0.1):
        with pytest.raises(AccountingError, match="finite"):
            RunLaw("geometric", 3.0).epsilon(ORDERS, np.full(len(ORDERS), bad), 1e-5)
