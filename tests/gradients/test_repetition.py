"""Tensors that a model computes from its parameters and constants once for each record."""

import pytest
import torch
from torch import nn

from ownerwise.gradients import Refused, Tape
from tools.record_loop import Model, assert_matches_loop, run

LENGTH, WIDTH = 4, 3


def positions(x, repeat=False):
    ids = torch.arange(LENGTH)[None]
    return ids.repeat(len(x), 1) if repeat else ids.expand(len(x), -1)


def once_a_record(m, x):
    return x + m.table(positions(x))


def copied_ids(m, x):
    return x * m.table(positions(x, repeat=True))


def two_tables(m, x):
    return x + (m.table(positions(x)) + m.kinds(torch.zeros(len(x), LENGTH, dtype=torch.long)))


def scaled(m, x):
    return x + (m.table(positions(x)) * 0.5).to(torch.float64).transpose(0, 1).transpose(0, 1)


def indexed(m, x):
    return x + m.table.weight[positions(x, repeat=True)]


def from_the_end(m, x):
    return x + m.table.weight[positions(x, repeat=True) - LENGTH]


def projected_constants(m, x):
    ramp = torch.linspace(0, 1, LENGTH * WIDTH).reshape(1, LENGTH, WIDTH).expand(len(x), -1, -1)
    return x + m.layer(ramp) * torch.einsum("blc,cd->bld", ramp, m.layer.weight)


def with_a_mask(m, x):
    """Copies for each record in a dimension that is folded with another, as in Swin."""
    mask = torch.tensor([0.0, 1.0]).reshape(1, 2, 1).expand(len(x), -1, 1).reshape(-1, 1, 1)
    halves = x.reshape(len(x) * 2, -1, WIDTH)
    return (halves * (m.table.weight[None, :2] + mask)).reshape(x.shape)


def repeated_for_bmm(m, x):
    """As in DeBERTa: the heads of a record are repeated for every record."""
    heads = x.reshape(len(x) * 2, -1, WIDTH)
    keys = m.table.weight.reshape(2, 2, WIDTH).repeat(len(x), 1, 1)
    return torch.bmm(heads, keys.transpose(-1, -2)).reshape(len(x), -1)


def records_second(m, x):
    """As in XLNet: time first."""
    ramp = torch.linspace(0, 1, LENGTH * WIDTH).reshape(LENGTH, 1, WIDTH).expand(-1, len(x), -1)
    keys = torch.einsum("tbc,cd->tbd", ramp, m.layer.weight)
    return torch.einsum("ibd,jbd->bij", x.transpose(0, 1), keys).flatten(1)


def with_padding(m, x):
    return x + m.padded(positions(x))


def in_both_ways(m, x):
    """The same table, looked up for records and for constants."""
    ids = (x[..., 0] > 0).long()
    return x + m.table(ids) * m.table(positions(x))


def model(forward):
    return Model(
        lambda m, x: m.last(forward(m, x).flatten(1)),
        table=nn.Embedding(LENGTH, WIDTH),
        kinds=nn.Embedding(2, WIDTH),
        padded=nn.Embedding(LENGTH, WIDTH, padding_idx=1),
        layer=nn.Linear(WIDTH, WIDTH),
        last=nn.LazyLinear(2),
    )


def kind_at_every_position(m, x):
    """Repeated for every record first, then along the positions."""
    return x + m.kinds(torch.zeros(len(x), 1, dtype=torch.long)).expand(-1, LENGTH, -1)


def selected_by_data(m, x):
    rows = m.table.weight.index_select(0, (x[..., 0] > 0).long().flatten())
    return x * rows.view(x.shape)


EXACT = [
    *(once_a_record, copied_ids, two_tables, scaled, indexed, from_the_end, projected_constants),
    *(with_a_mask, repeated_for_bmm, records_second, with_padding, in_both_ways),
    *(kind_at_every_position, selected_by_data),
]


@pytest.mark.parametrize("records", [1, 2, LENGTH, 5, 2 * LENGTH])
@pytest.mark.parametrize("forward", EXACT)
def test_the_gradient_is_that_of_one_copy(forward, records):
    made = model(forward)
    made(torch.zeros(1, LENGTH, WIDTH))
    assert_matches_loop(made, torch.randn(records, LENGTH, WIDTH))


def by_place(m, x):
    return x + m.table(torch.arange(len(x)))[:, None]


def by_place_and_position(m, x):
    return x + m.table((positions(x) + torch.arange(len(x))[:, None]) % LENGTH)


def equal_today(m, x):
    """All rows have the same values (zero), but are different parameters."""
    return x + (m.zeros(torch.arange(len(x)))[:, None] + 1)


def masked_differently(m, x):
    kept = torch.ones(len(x), 1, 1)
    kept[0] = 2
    return x + m.table(positions(x)) * kept


def dropped(m, x):
    return x + nn.functional.dropout(m.table(positions(x)), 0.5)


def rolled(m, x):
    """Copies, but another one for each record by now."""
    return x + torch.stack([m.table.weight.roll(i, 0) for i in range(len(x))])


@pytest.mark.parametrize(
    "forward", [by_place, by_place_and_position, equal_today, masked_differently, dropped, rolled]
)
def test_what_depends_on_the_place_in_the_batch_is_refused(forward):
    """Pitfall 64: without the first record, the others would contribute something else."""
    made = model(forward)
    made.zeros = nn.Embedding(LENGTH, WIDTH)
    nn.init.zeros_(made.zeros.weight)
    made(torch.zeros(3, LENGTH, WIDTH))
    with pytest.raises(Refused, match="entry for each of the 3 records"):
        run(Tape(made), torch.randn(3, LENGTH, WIDTH))


def test_a_summed_dimension_of_a_constant_is_not_shortened():
    """Its copies are added up: with one of them, the gradient would be too small."""

    def forward(m, x):
        ones = torch.ones(len(x), 6)
        return x * torch.einsum("bk,cd->bcd", ones, m.layer.weight).sum(1, keepdim=True)

    made = model(forward)
    made(torch.zeros(1, LENGTH, WIDTH))
    with pytest.raises(Refused, match="entry for each"):  # sum is not followed
        run(Tape(made), torch.randn(3, LENGTH, WIDTH))

    def kept(m, x):
        ones = torch.ones(len(x), 6)
        return x * torch.einsum("bk,cd->bd", ones, m.layer.weight).unsqueeze(1)

    made = model(kept)
    made(torch.zeros(1, LENGTH, WIDTH))
    assert_matches_loop(made, torch.randn(3, LENGTH, WIDTH))
