"""Norms by Gram matrices: a record whose terms cancel must not slip through the clip norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ownerwise.gradients import Tape
from ownerwise.gradients.contributions.grams import gram, squares_from_grams

RECORDS = 4


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(48, 48))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Twice(Linear):
    def forward(self, x):
        return torch.cat([super(Twice, self).forward(part) for part in x.chunk(2, dim=1)], dim=1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(48, 48, 1, bias=False)

    def forward(self, x):
        return self.layer(x.mT).mT


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 48)

    def forward(self, x):
        return self.table(x.long()[..., 0].abs() % 5)


def records(model, x, signs):
    """Records whose loss weighs the outputs of each token by `signs`."""
    tape = Tape(model)
    with tape:
        outputs = model(x)
    return tape.backward((outputs * signs).sum(dim=(1, 2)))


@pytest.mark.parametrize("kind", [Linear, Twice, Convolution, Embedded])
@pytest.mark.parametrize("apart", [1e-5, 1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("terms", [2, 6, 12])
def test_no_norm_is_too_small(kind, apart, terms):
    """Like tokens far from 0, weighed by numbers that add up to nearly nothing, in float32."""
    torch.manual_seed(terms)
    model = kind().double()
    x = 100.0 * torch.randn(RECORDS, 1, 48) * (1 + apart * torch.rand(RECORDS, terms, 1))
    signs = torch.randn(RECORDS, terms, 48)
    signs = (signs - signs.mean(dim=1, keepdim=True)) * (1 + apart * torch.rand(terms, 1))
    x, signs = x.float().double(), signs.float().double()  # the same numbers in both precisions
    formed = records(model, x, signs).per_record()
    true = torch.stack([g.flatten(1).norm(dim=1) for g in formed.values()]).norm(dim=0)
    small = records(model.float(), x.float(), signs.float())
    found = small.norms.double()
    factors = 1 / small.norms
    whole = small.weighted_sum(factors)
    for i in range(RECORDS):
        rest = small.weighted_sum(factors.index_fill(0, torch.tensor([i]), 0.0))
        parts = [(whole[p] - rest[p]).double().norm() for p in whole]
        assert float(torch.stack(parts).norm()) <= 1 + 1e-3
    size = 100.0 * 48 * terms  # about what the norm were without cancelling
    assert (found <= true * (1 + 2e-4) + 1e-4 * size).all()


def test_the_limit_is_where_rounding_begins_to_matter():
    """Just above the limit, where nothing is formed, no square is too small, or 0.6% too large."""
    torch.manual_seed(0)
    ratios = []
    for _ in range(200):
        left = torch.randn(8, 6, 32, dtype=torch.float64)
        left -= left.mean(dim=1, keepdim=True) * (1 - 10 ** -float(3 * torch.rand(())))
        right = torch.randn(8, 1, 32) + 10 ** -float(2 * torch.rand(())) * torch.randn(8, 6, 32)
        left, right = left.float(), right.float()
        formed: list[int] = []

        def form(number, formed=formed):
            formed.append(number)
            return torch.zeros(1)

        found = squares_from_grams(gram(left), gram(right), 64, form).double()
        true = torch.bmm(left.double().mT, right.double()).square().sum(dim=(1, 2))
        kept = [number for number in range(8) if number not in formed]
        ratios += (found / true)[kept].tolist()
    assert 1 <= min(ratios) < 1 + 1e-3
    assert 1 + 4e-3 < max(ratios) < 1 + 6e-3


def test_double_precision_and_zero_records():
    left, right = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 6).double()
    left[1] = 0
    found = squares_from_grams(gram(left), gram(right), 11, lambda number: pytest.fail("formed"))
    torch.testing.assert_close(found, torch.bmm(left.mT, right).square().sum(dim=(1, 2)))
    assert found[1] == 0


def test_what_is_not_finite_stays_so():
    left = torch.randn(2, 3, 4)
    left[0, 0, 0] = torch.nan
    found = squares_from_grams(
        gram(left), gram(torch.randn(2, 3, 4)), 8, lambda number: left[number]
    )
    assert found[0].isnan()
    assert found[1].isfinite()
