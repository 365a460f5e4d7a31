"""Normalisations against the loop over records, at random shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tools.record_loop import COUNT, FEW, assert_matches_loop

SIZE = st.integers(1, 4)
SPACE = st.lists(st.integers(2, 4), max_size=3)


def assert_layer(data, make, *shape):
    """Two of the layer, so that the second passes gradients on; parameters frozen at random."""
    model = nn.Sequential(make(), nn.Tanh(), make())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(data.draw(st.booleans()))
    assert_matches_loop(model, torch.randn(data.draw(COUNT), *shape) * 2 + 1)


@FEW
@given(st.data(), st.lists(SIZE, max_size=2), st.lists(SIZE, min_size=1, max_size=2), st.booleans())
def test_layer_norm(data, inner, normalised, bias):
    assert_layer(data, lambda: nn.LayerNorm(normalised, bias=bias), *inner, *normalised)


@FEW
@given(st.data(), st.lists(SIZE, max_size=2), st.lists(SIZE, min_size=1, max_size=2))
def test_rms_norm(data, inner, normalised):
    eps = data.draw(st.sampled_from([None, 1e-3]))
    assert_layer(data, lambda: nn.RMSNorm(normalised, eps=eps), *inner, *normalised)


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 3), SPACE)
def test_group_norm(data, groups, width, space):
    width = width if space else width + 1  # torch refuses groups of one value
    channels = groups * width
    assert_layer(data, lambda: nn.GroupNorm(groups, channels), channels, *space)


@FEW
@given(st.data(), SIZE, SPACE.filter(len))
def test_instance_norm(data, channels, space):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(space) - 1]
    assert_layer(data, lambda: kind(channels, affine=True), channels, *space)


@pytest.mark.parametrize("family", ["BatchNorm", "InstanceNorm"])
@FEW
@given(st.data(), SIZE, SPACE.filter(len))
def test_fixed_statistics(family, data, channels, space):
    """In eval mode both are affine maps of each entry."""

    def make():
        kind = getattr(nn, f"{family}{len(space)}d")
        layer = kind(channels, affine=True, track_running_stats=True).eval()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        return layer

    assert_layer(data, make, channels, *space)
