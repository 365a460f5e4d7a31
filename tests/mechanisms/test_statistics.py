"""Column statistics: what a record contributes, what follows from the sums, and the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ownerwise as ow
from ownerwise.accounting import gaussian_mu
from ownerwise.mechanisms import as_statistics

anything = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(width=32),  # also NaN, infinities and subnormal numbers
    st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 3.4e38, -0.0]),
)


@given(arrays.arrays(np.float32, (5, 7), elements=anything))
def test_no_record_adds_more_than_1(inputs):
    """Whatever the inputs contain: 3 numbers, 3 flags that need not be 0 or 1, another column."""
    rows = ow.Standardise(3).contributions(torch.from_numpy(inputs))
    assert rows.shape == (5, 9)
    assert rows.dtype == torch.float64
    assert torch.isfinite(rows).all()
    assert float(rows.norm(dim=1).max()) <= 1 + 1e-15


def test_the_longest_contribution_is_1():
    rows = ow.Standardise(2).contributions(torch.tensor([[1.0, -1.0, 0, 0], [0, 0, 0, 0]]))
    np.testing.assert_allclose(rows.norm(dim=1), 1)


def test_values_that_are_not_finite_count_as_missing_and_others_are_clipped():
    values = torch.tensor([[np.nan], [np.inf], [-np.inf], [3e38], [-7.0], [0.5]])
    rows = ow.Standardise(1).contributions(torch.cat([values, torch.zeros(6, 1)], dim=1))
    assert not rows[:3].any()
    beyond = ow.Standardise(1).contributions(torch.tensor([[1.0, 0], [-1, 0]]))
    assert torch.equal(rows[3:5], beyond)
    weighted = torch.tensor([np.sqrt(0.5), 0.5, 0.75]) / np.sqrt(1.5)
    np.testing.assert_allclose(rows[5], weighted, rtol=1e-7)


def test_a_record_does_not_depend_on_its_neighbours():
    """To the last bit, whatever the number of rows and the place among them."""
    inputs = torch.rand(301, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    inputs[:, 4:] = (inputs[:, 4:] > 0).float()
    layer = ow.Standardise(4)
    together = layer.contributions(inputs)
    for at in (0, 1, 7, 300):
        assert torch.equal(layer.contributions(inputs[at : at + 1])[0], together[at])
    order = torch.randperm(301)
    assert torch.equal(layer.contributions(inputs[order]), together[order])


def bound_statistics(std, records=1000, **options):
    owners = ow.Owners(np.arange(records), np.full(records, 8.0), 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=10, statistics=ow.ColumnStatistics())
    statistics = ow.ColumnStatistics(**options).bind(plan)
    statistics._std = std
    return statistics


def columns(records=1000, seed=0):
    rng = np.random.default_rng(seed)
    values = np.stack([rng.normal(0.4, 0.1, records), rng.normal(-0.8, 0.05, records)], 1)
    missing = rng.random((records, 2)) < [0.0, 0.4]
    inputs = np.concatenate([np.where(missing, 0, values), missing], axis=1)
    return torch.tensor(inputs, dtype=torch.float32).clamp(-1, 1)


def test_without_noise_they_are_the_mean_and_the_standard_deviation():
    inputs, layer, statistics = columns(), ow.Standardise(2), bound_statistics(1e-9)
    statistics.observe(layer.contributions(inputs).sum(dim=0), layer)
    known = inputs[:, 2:] == 0
    found, mean, deviation = statistics.estimates()
    for at in range(2):
        values = inputs[known[:, at], at].double()
        assert found[at] == pytest.approx(len(values))
        assert mean[at] == pytest.approx(float(values.mean()), rel=1e-6)
        assert deviation[at] == pytest.approx(float(values.std(correction=0)), rel=1e-4)
        standardised = layer(inputs)[:, at]
        assert float(standardised[known[:, at]].mean()) == pytest.approx(0, abs=1e-2)
        assert float(standardised[known[:, at]].std()) == pytest.approx(1, rel=2e-2)
        assert not standardised[~known[:, at]].any()
    assert torch.equal(layer(inputs)[:, 2:], inputs[:, 2:])
    assert layer.released


def test_a_column_that_is_only_noise_keeps_its_range():
    inputs, layer, statistics = columns(), ow.Standardise(2), bound_statistics(1e4)
    total = layer.contributions(inputs).sum(dim=0)
    noise = torch.randn(6, generator=torch.Generator().manual_seed(1)).double()
    statistics.observe(total + 1e4 * noise, layer)
    assert torch.equal(layer(inputs)[:, :2], inputs[:, :2] * (1 - inputs[:, 2:]))


def test_noise_is_rarely_magnified_and_means_stay_within_the_range():
    """20 releases at each of 5 noises, among them some far larger than the sums."""
    magnified = 0
    inputs = columns()
    generator = torch.Generator().manual_seed(2)
    total = ow.Standardise(2).contributions(inputs).sum(dim=0)
    for std in (1.0, 10.0, 50.0, 200.0, 1e5):
        for _ in range(20):
            layer, statistics = ow.Standardise(2), bound_statistics(std)
            statistics.observe(total + std * torch.randn(6, generator=generator), layer)
            assert (layer.mean.abs() <= 1).all()
            assert (layer.scale >= 1).all()
            # the true deviations are .1 and .05
            magnified += int((layer.scale * torch.tensor([0.1, 0.05]) > 1.5).sum())
    assert magnified <= 10  # of 200


def test_values_far_from_the_mean_are_clipped():
    layer = ow.Standardise(1)
    layer.scale.fill_(1000.0)
    assert layer(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))[:, 0].tolist() == [5.0, -5.0]


def test_the_noise_spends_the_share_of_the_strictest_owner():
    epsilon, delta = np.array([4.0, 1.0, 2.0]), np.array([1e-5, 1e-5, 1e-9])
    release = ow.ColumnStatistics(share=0.2).opening(epsilon, delta, "record")
    least = min(gaussian_mu(1.0, 1e-5), gaussian_mu(2.0, 1e-9))
    assert release.std**-2 == pytest.approx(0.2 * least**2)
    assert not release.together
    assert ow.ColumnStatistics().opening(epsilon, delta, "owner").together


def test_a_state_is_restored():
    layer, statistics = ow.Standardise(2), bound_statistics(1.0)
    statistics.observe(torch.arange(6.0), layer)
    again = bound_statistics(1.0)
    assert not again.released
    again.load_state(statistics.state())
    assert again.released
    assert again.record() == statistics.record()
    for sums in ([], [[1.0]], [[1.0], [2.0], [float("nan")]]):
        with pytest.raises(ValueError, match="finite"):
            again.load_state({"sums": sums})


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan"), "a tenth", True, None])
def test_shares_that_are_refused(share):
    with pytest.raises(ow.OwnerwiseError, match=r"statistics\.share"):
        ow.ColumnStatistics(share=share)


def test_descriptions():
    assert as_statistics(True).share == 0.05
    assert as_statistics({"share": 0.1}).share == 0.1
    assert as_statistics(False) is None
    assert as_statistics(None) is None
    with pytest.raises(ow.OwnerwiseError, match=r"statistics\.shares is unknown"):
        as_statistics({"shares": 0.1})
    with pytest.raises(ow.OwnerwiseError, match="at least one column"):
        ow.Standardise(0)


def test_statistics_that_their_noise_hides_are_a_concern_before_any_work():
    """By public numbers alone: the noise on a mean, relative to half the range."""
    statistics = bound_statistics(std=10.0)  # 1,000 records
    noise = {columns: 10 * np.sqrt(1.5 * columns) / 1000 for columns in (66, 67)}
    assert noise[66] < 0.1 < noise[67]
    assert statistics.concerns(66) == []
    assert "0.1 times half its declared range" in statistics.concerns(67)[0]
    assert "of 670 columns" in statistics.concerns(670)[0]
    assert "0.32 times" in statistics.concerns(670)[0]
