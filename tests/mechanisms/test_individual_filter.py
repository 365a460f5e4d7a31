"""The filter of individual accounting: what it charges, exactly, and when records retire."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ownerwise as ow
from ownerwise.mechanisms import IndividualFilter, Sensitivity
from ownerwise.mechanisms.individual_filter import WHOLE

ROUNDING = Sensitivity(1e-5, 7e-3)
RECORDS = 6


@cache
def plan(to_remaining: bool = False, clipped_steps: float = 4.0) -> ow.Plan:
    owners = ow.Owners(np.arange(RECORDS) % 3, {0: 0.5, 1: 1.0, 2: 4.0})
    return ow.plan(
        owners, method="individual", steps=50, clipped_steps=clipped_steps, clip_norm=0.7,
        clip_to_remaining=to_remaining,
    )  # fmt: skip


def step(individual, lengths) -> np.ndarray:
    individual.begin()
    factors = individual.admit(np.arange(RECORDS), np.asarray(lengths, dtype=np.float64))
    individual.commit()
    return factors


def exact_cost(a_plan, record: int, length: float) -> Fraction:
    """The share of the budget that a contribution costs, without rounding."""
    of = record % 3
    clip = Fraction(float(a_plan.clip_norms[of]))
    change = (
        Fraction(length) * (1 + Fraction(ROUNDING.relative)) + Fraction(ROUNDING.absolute) * clip
    )
    room = Fraction(float(a_plan.filter_limits[of])) * Fraction(a_plan.noise_std) ** 2
    return min(change, clip) ** 2 / room


@given(
    st.lists(
        st.lists(st.floats(0, 0.5), min_size=RECORDS, max_size=RECORDS), min_size=1, max_size=40
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_spends_never_understate_the_exact_cost_nor_exceed_the_budget(rounds, to_remaining):
    a_plan = plan(to_remaining)
    individual = IndividualFilter(a_plan, ROUNDING)
    exact = [Fraction(0)] * RECORDS
    retired = np.zeros(RECORDS, dtype=bool)
    for lengths in rounds:
        lengths = np.minimum(lengths, a_plan.clip_norms[np.arange(RECORDS) % 3])
        factors = step(individual, lengths)
        assert (factors[retired] == 0).all()  # for ever
        for record in range(RECORDS):
            if factors[record] > 0:
                used = float(factors[record] * lengths[record])
                exact[record] += exact_cost(a_plan, record, used)
            share = Fraction(int(individual.spent[record]), WHOLE)
            assert exact[record] <= share <= 1
        retired = ~individual.active
    close = [
        float(Fraction(int(s), WHOLE) - e)
        for s, e, gone in zip(individual.spent, exact, retired, strict=True)
        if not gone
    ]
    assert all(gap <= 1e-9 for gap in close)  # rounded up by next to nothing


def test_a_clipped_record_is_charged_its_clip_norm_exactly():
    a_plan = plan()
    individual = IndividualFilter(a_plan, ROUNDING)
    clips = a_plan.clip_norms[np.arange(RECORDS) % 3]
    step(individual, clips / (1 + ROUNDING.absolute))  # what a clipped contribution is long
    once = individual.spent
    individual.charge_lost(1)
    np.testing.assert_array_equal(individual.spent, 2 * once)
    room = a_plan.filter_limits[np.arange(RECORDS) % 3] * a_plan.noise_std**2
    np.testing.assert_allclose(once / WHOLE, clips**2 / room, rtol=1e-9)


def test_clipped_records_take_part_in_exactly_the_planned_number_of_steps():
    individual = IndividualFilter(plan(), ROUNDING)
    clips = plan().clip_norms[np.arange(RECORDS) % 3]
    taken = sum(step(individual, clips) for _ in range(10))
    assert (taken == 4).all()
    assert (plan().clipped_steps == 4).all()


def test_a_gradient_of_zero_is_charged_for_rounding():
    individual = IndividualFilter(plan(), ROUNDING)
    step(individual, np.zeros(RECORDS))
    assert (individual.spent > 0).all()
    free = IndividualFilter(plan(), Sensitivity(0.0, 0.0))
    step(free, np.zeros(RECORDS))
    assert (free.spent == 0).all()


def test_what_remains_pays_for_one_more_shorter_step():
    individual = IndividualFilter(plan(True, 4.5), ROUNDING)
    clips = plan(True, 4.5).clip_norms[np.arange(RECORDS) % 3]
    factors = np.array([step(individual, clips) for _ in range(8)])
    assert (factors[:4] == 1).all()
    np.testing.assert_allclose(factors[4], 0.5**0.5, rtol=0.02)
    assert (factors[5:] == 0).all()
    assert (individual.spent == WHOLE).all()


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 10**12])
def test_lost_steps_are_charged_to_everyone_at_the_clip_norm(steps):
    lost, taken = (IndividualFilter(plan(), ROUNDING) for _ in range(2))
    lost.charge_lost(steps)
    clips = plan().clip_norms[np.arange(RECORDS) % 3]
    for _ in range(min(steps, 6)):
        step(taken, clips)
    assert (lost.spent >= taken.spent).all()
    assert lost.active.all() == (steps <= 4)


def test_a_step_that_is_not_committed_charges_nobody():
    individual = IndividualFilter(plan(), ROUNDING)
    individual.begin()
    individual.admit(np.arange(RECORDS), np.ones(RECORDS))
    assert (individual.spent == 0).all()
    individual.begin()
    individual.commit()
    assert (individual.spent == 0).all()


@pytest.mark.parametrize(
    "spent",
    [np.zeros(RECORDS - 1, np.int64), np.zeros(RECORDS), np.full(RECORDS, -1),
     np.full(RECORDS, WHOLE + 1)],
)  # fmt: skip
def test_impossible_spends_are_not_loaded(spent):
    with pytest.raises(ValueError):
        IndividualFilter(plan(), ROUNDING).load(spent)


def test_a_record_with_several_owners_obeys_the_strictest_of_them():
    epsilon = {"ada": 0.5, "ben": 4.0}
    owners = ow.Owners([("ada", "ben"), ("ada",), ("ben",)], epsilon)
    a_plan = ow.plan(
        owners, method="individual", steps=30, clipped_steps=4, clip_norm=1.0, mixture=0.0
    )
    individual = IndividualFilter(a_plan, Sensitivity(0.0, 0.0))
    taken = np.zeros(3)
    for _ in range(30):
        individual.begin()
        taken += individual.admit(np.arange(3), np.ones(3))
        individual.commit()
    np.testing.assert_array_equal(taken, a_plan.clipped_steps[[0, 0, 1]].clip(max=30))
    assert taken[2] > taken[0]
