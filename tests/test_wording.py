"""Numbers as pages show them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerwise import wording


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (2.0049, 3, "2.01"),
        (2.0, 3, "2"),
        (0.1, 3, "0.1"),
        (0.99891, 3, "0.999"),
        (0.9996, 3, "1"),
        (0.99941, 4, "0.9995"),
        (1.049e-5, 2, "1.1e-05"),
        (9.991, 3, "10"),
        (0.0, 3, "0"),
        (float("inf"), 3, "inf"),
    ],
)
def test_what_is_spent_is_rounded_up(value, digits, text):
    assert wording.up(value, digits) == text


@given(st.floats(1e-12, 1e6), st.integers(2, 6))
def test_rounding_up_never_understates_and_hardly_overstates(value, digits):
    shown = float(wording.up(value, digits))
    assert value * (1 - 1e-11) <= shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-11)


@given(st.floats(1e-12, 1e6), st.integers(2, 6))
def test_lower_bounds_are_rounded_down_and_hardly_understated(value, digits):
    shown = float(wording.down(value, digits))
    assert value * (1 - 10.0 ** (1 - digits)) * (1 - 1e-11) <= shown <= value * (1 + 1e-11)
    assert wording.down(0.0, digits) == "0"


def test_deltas_are_rounded_up_and_ranges_are_in_order():
    assert wording.delta(1e-5) == "1e-5"
    assert wording.delta(1.049e-5) == "1.1e-5"
    assert wording.delta_span(1e-6, 1e-5) == "1e-6 to 1e-5"
    assert wording.delta_span(1e-5, 1e-5) == "1e-5"


def test_the_spent_share_of_a_budget_is_rounded_up():
    assert wording.percent_up(0.998301) == "99.84%"
    assert wording.percent_up(1.0) == "100.00%"
