"""Public bounds on a batch: never below the exact tail, and close to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from ownerwise.planning.batch_bounds import largest_total


@pytest.mark.parametrize("probability", [1e-3, 1e-9, 1e-20])
@pytest.mark.parametrize(("rate", "records"), [(0.01, 51_200), (0.5, 40), (1e-6, 1000), (1.0, 30)])
def test_the_count_covers_the_exact_binomial_tail_without_much_waste(rate, records, probability):
    one = np.ones(1)
    bound = largest_total(rate * one, records * one, one, probability)
    assert binom.sf(np.ceil(bound) - 1, records, rate) <= probability or bound == records
    exact = binom.isf(probability, records, rate)
    assert bound <= exact + 2 + 0.8 * np.sqrt(records * rate)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1), st.integers(1, 5), st.floats(0.01, 100)),
        min_size=1,
        max_size=4,
    ),
    st.floats(1e-6, 0.5),
)
def test_weighted_totals_cover_the_exact_tail_by_enumeration(owners, probability):
    rates, records, amounts = (
        np.array(column, dtype=float) for column in zip(*owners, strict=True)
    )
    bound = largest_total(rates, records, amounts, probability)
    totals, chances = np.zeros(1), np.ones(1)
    for rate, count, amount in owners:
        drawn = np.arange(count + 1)
        totals = (totals[:, None] + amount * drawn).ravel()
        chances = (chances[:, None] * binom.pmf(drawn, count, rate)).ravel()
    assert chances[totals > bound * (1 + 1e-12)].sum() <= probability * (1 + 1e-9)


def test_a_million_owners_take_a_moment():
    rng = np.random.default_rng(0)
    rates, amounts = rng.uniform(1e-4, 1e-2, 10**6), rng.uniform(0.1, 2, 10**6)
    bound = largest_total(rates, np.ones(10**6), amounts, 1e-20)
    mean, deviation = rates @ amounts, np.sqrt((rates * (1 - rates)) @ amounts**2)
    assert mean + 9 * deviation < bound < mean + 11 * deviation


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1.0, float("nan")])
def test_probabilities_outside_of_0_to_1_are_refused(wrong):
    with pytest.raises(ValueError, match="expected more than 0 and less than 1"):
        largest_total(np.ones(1), np.ones(1), np.ones(1), wrong)
