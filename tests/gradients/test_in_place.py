"""Pitfall 24: outputs of layers that are changed in place, such as hidden states set to zero.

With three dimensions, `linear` and `embedding` return views of a flat tensor, whose graph nodes are
replaced by an in-place change. The gradient must still arrive, or the layer would not be trained.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ownerwise.gradients import Refused, Tape
from tools.record_loop import Model, assert_matches_loop, run


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


def with_a_row(m, x):
    weight = m.layer.weight.clone()
    weight[0] = m.row
    return functional.linear(x, weight)


def with_an_empty_row(m, x):
    weight = m.layer.weight * 2
    weight[0] = 0
    return functional.linear(x, weight)


def built_from_rows(m, x):
    weight = torch.zeros(4, 4)
    weight[0] = m.row
    weight[2] = m.row * 2
    return m.layer(x) * functional.linear(x, weight)


def shifted(m, x):
    weight = m.layer.weight * 2
    weight += m.row
    return functional.linear(x, weight)


def derived(forward):
    return Model(
        lambda m, x: forward(m, x).sum(1),
        row=torch.randn(4),
        layer=nn.Linear(4, 4),
        table=nn.Embedding(6, 4),
    )


@pytest.mark.parametrize("forward", [with_a_row, with_an_empty_row, built_from_rows, shifted])
@pytest.mark.parametrize("count", [1, 3])
def test_a_tensor_computed_from_parameters(forward, count):
    """What is written into it was left untrained."""
    assert_matches_loop(derived(forward), torch.randn(count, 6, 4))


def positions(m, x):
    return m.table(torch.arange(6).expand(len(x), 6))


def first_position(m, x):
    places = positions(m, x)
    places[:, 0] = m.row
    return x + places


def first_position_by_view(m, x):
    places = positions(m, x)
    places[:, 0].mul_(m.row)
    return x + places


def part_of_a_repetition(m, x):
    rows = m.table.weight * 2
    places = rows.repeat(len(x), 1)
    rows *= 3
    return (x.flatten(0, 1) * places).reshape(x.shape)


def view(m, x):
    weight = m.layer.weight * 2
    weight[0].mul_(m.row)
    return functional.linear(x, weight)


def after_its_use(m, x):
    weight = m.layer.weight * 2
    hidden = functional.linear(x, weight)
    weight += m.row
    return functional.linear(hidden, weight)


def data_unseen(m, x):
    places = positions(m, x)
    with torch.no_grad():
        places.add_(x)
    return x + places * m.row


def data_by_another_name(m, x):
    places = positions(m, x)
    places.detach().add_(x)
    return x + places * m.row


@pytest.mark.parametrize(
    "forward",
    [
        *(first_position, first_position_by_view, part_of_a_repetition, view, after_its_use),
        *(data_unseen, data_by_another_name),
    ],
)
def test_a_change_that_others_would_not_notice_is_refused(forward):
    with pytest.raises(Refused, match=r"in place|an entry for each|data are written"):
        run(Tape(derived(forward)), torch.randn(3, 6, 4))


def test_a_constant_filled_with_data_through_a_view():
    def forward(m, x):
        filled = torch.zeros(x.shape)
        for i in range(len(x)):
            filled[i].copy_(x[i])
        return m.layer(filled)

    assert_matches_loop(derived(forward), torch.randn(3, 6, 4))
