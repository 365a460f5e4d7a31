import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownerwise.accounting.moments import highest_order, log_moments


def by_quadrature(rate, multiplier, order):
    """The slow obvious integral, with 30 digits."""
    with mp.workdps(30):
        rate, shift = mp.mpf(rate), mp.mpf(1) / multiplier

        def integrand(u):
            ratio = 1 - rate + rate * mp.e ** (shift * u - shift**2 / 2)
            return mp.npdf(u) * ratio**order

        low = -14 + min(order, 0) / multiplier
        high = 14 + max(order, 1) / multiplier
        points = [low, -5, 0, 1 / multiplier, 5, max(order, 1) / multiplier, high]
        return float(mp.log(mp.quad(integrand, sorted(set(points)))))


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0])
def test_moments_equal_numerical_integration(rate, multiplier):
    orders = np.array([-3.0, 0.5, 1.1, 2.0, 2.5, 7.3])
    ours = log_moments(rate, multiplier, orders)
    exact = [by_quadrature(rate, multiplier, float(order)) for order in orders]
    np.testing.assert_allclose(ours, exact, rtol=2e-6, atol=1e-17)


@given(
    rate=st.floats(1e-7, 0.999),
    multiplier=st.floats(0.3, 50.0),
    order=st.integers(2, 40),
)
@settings(max_examples=100, deadline=None)
def test_whole_orders_equal_the_binomial_sum(rate, multiplier, order):
    """Mironov, Talwar, Zhang (2019), section 3.3: a finite sum for whole orders."""
    k = np.arange(2, order + 1)
    log_terms = (
        np.array(
            [math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in k]
        )
        + (order - k) * np.log1p(-rate)
        + k * np.log(rate)
    )
    exponent = (k**2 - k) / (2 * multiplier**2)
    log_excess = np.logaddexp.reduce(
        log_terms + np.where(exponent < 30, np.log(np.expm1(np.minimum(exponent, 30))), exponent)
    )
    expected = np.logaddexp(0.0, log_excess) if log_excess > -30 else np.exp(log_excess)
    ours = log_moments(rate, multiplier, np.array([float(order)]))[0]
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-18)


def test_no_sampling_is_free_and_full_sampling_is_gaussian():
    orders = np.array([1.5, 2.0, 30.0])
    assert (log_moments(0.0, 1.0, orders) == 0).all()
    np.testing.assert_allclose(log_moments(1.0, 2.0, orders), orders * (orders - 1) / 8)


def test_highest_order_grows_with_noise_and_is_never_useless():
    assert highest_order(0.01, 0.3) >= 8
    assert highest_order(0.01, 10.0) > highest_order(0.01, 1.0)
