"""Pitfall 24: outputs of layers that are changed in place, such as hidden states set to zero.

With three dimensions, `linear` and `embedding` return views of a flat tensor, whose graph nodes are
replaced by an in-place change. The gradient must still arrive, or the layer would not be trained.
"""

import pytest
import torch
from torch import nn

from tools.record_loop import Model, assert_matches_loop


def zeroed(h, x):
    h[x[..., 0] > 0] = 0
    return h


def multiplied(h, x):
    return h.mul_(x[..., :1])


def rectified(h, x):
    return h.relu_()


def in_part(h, x):
    h[:, 1:3] *= 2
    return h


CHANGES = [zeroed, multiplied, rectified, in_part]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_linear(change, bias, first):
    model = Model(
        lambda m, x: m.last(change(m.layer(x if first else m.before(x)), x)).sum(dim=1),
        before=nn.Linear(4, 4),
        layer=nn.Linear(4, 5, bias=bias),
        last=nn.Linear(5, 2),
    )
    assert_matches_loop(model, torch.randn(3, 6, 4))


@pytest.mark.parametrize("change", CHANGES)
def test_embedding(change):
    model = Model(
        lambda m, x: m.last(change(m.table((x[..., 0] > 0).long()), x)).sum(dim=1),
        table=nn.Embedding(3, 5),
        last=nn.Linear(5, 2),
    )
    assert_matches_loop(model, torch.randn(3, 6, 4))


@pytest.mark.parametrize("change", CHANGES)
def test_attention(change):
    model = Model(
        lambda m, x: m.last(change(m.layer(x, x, x, need_weights=False)[0], x)).sum(dim=1),
        layer=nn.MultiheadAttention(4, 2, batch_first=True),
        last=nn.Linear(4, 2),
    )
    assert_matches_loop(model, torch.randn(3, 6, 4))


def test_a_view_with_another_layout():
    """The output of a call that returns a transposed view is copied."""
    model = Model(
        lambda m, x: m.last(multiplied(torch.einsum("btc,cd->bdt", x, m.weight).mT, x)).sum(dim=1),
        weight=torch.randn(4, 5),
        last=nn.Linear(5, 2),
    )
    assert_matches_loop(model, torch.randn(3, 6, 4))
