"""Segments: rows that form one element, against the mean of the rows' gradients by autograd.

Every exactness test of a layer (`tools.record_loop.assert_matches_loop`) covers segments as well.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ownerwise.gradients import Chain, Tape
from ownerwise.gradients import chain as chain_module
from ownerwise.gradients.contributions import grouped
from ownerwise.gradients.contributions.grams import gram
from ownerwise.gradients.memory_budget import MemoryBudget
from tools.record_loop import (
    FEW,
    Model,
    assert_equal,
    averaged,
    loop,
    norms_of,
    run,
    segments_of,
    wavy,
)

RAGGED = [1, 50, 3, 1, 17, 2, 8]


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def by_chain(model, x, sizes):
    chain = Chain.of(model, x)
    assert chain is not None
    return chain.backward(wavy(chain.forward(x)), segments_of(*sizes))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
@FEW
def test_random_sizes(sizes):
    model, x = mlp(), torch.randn(sum(sizes), 4)
    expected = averaged(loop(model, x), sizes)
    assert_equal(run(Tape(model), x, segments=segments_of(*sizes)), expected, 1e-10)
    chain = by_chain(model, x, sizes)
    norms = norms_of(expected)
    torch.testing.assert_close(chain.norms, norms, rtol=1e-10, atol=0)
    factors = torch.linspace(0.5, 1.0, len(sizes))
    for in_blocks in (True, False):
        sums = chain.weighted_sum(factors, in_blocks=in_blocks)
        for parameter, gradients in expected.items():
            total = torch.tensordot(factors, gradients, dims=1)
            torch.testing.assert_close(sums[parameter], total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parts_of_a_chain(frozen):
    model, x = mlp(), torch.randn(sum(RAGGED), 4)
    model.get_parameter(frozen).requires_grad_(False)
    expected = norms_of(averaged(loop(model, x), RAGGED))
    torch.testing.assert_close(by_chain(model, x, RAGGED).norms, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("sizes", [RAGGED, [4] * 9, [1] * 40 + [64], [1, 2, 3, 2]])
def test_norms_of_a_chain_in_parts(monkeypatch, sizes):
    """Where the gradients of all owners are too many to be kept."""
    monkeypatch.setattr(chain_module, "_MOST_HELD", 100)
    monkeypatch.setattr(chain_module.ChainGradients, "_form", None)
    widths, rows = 4 * (9 if sizes == RAGGED else 1), sum(sizes)
    model = nn.Sequential(nn.Linear(4, widths * 30), nn.Tanh(), nn.Linear(widths * 30, 30))
    x = torch.randn(rows, 4)
    expected = norms_of(averaged(loop(model, x), sizes))
    torch.testing.assert_close(by_chain(model, x, sizes).norms, expected, rtol=1e-10, atol=0)


def test_an_owner_with_many_rows_needs_no_square_of_their_number(monkeypatch):
    """The step on 64 owners of 5,000 rows each would have taken 26 GB."""
    formed, sizes = [], [1] * 40 + [600]

    def noted(vectors):
        formed.append(vectors.shape[1])
        return gram(vectors)

    monkeypatch.setattr(chain_module, "gram", noted)
    model, x = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)), torch.randn(640, 4)
    expected = norms_of(averaged(loop(model, x), sizes))
    torch.testing.assert_close(by_chain(model, x, sizes).norms, expected, rtol=1e-10, atol=0)
    assert max(formed, default=0) < 30


def tied():
    def forward(m, ids):
        return m.table(ids).mean(dim=1).tanh() @ m.table.weight.T

    return Model(forward, table=nn.Embedding(11, 4))


def recurrent():
    model = nn.LSTM(3, 4, batch_first=True)
    return Model(lambda m, x: m.lstm(x)[0].mean(dim=1), lstm=model)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", ["tied", "lstm", "cnn", "embedding"])
def test_ragged_owners(kind, lean):
    rows = sum(RAGGED)
    model, x = {
        "tied": lambda: (tied(), torch.randint(0, 11, (rows, 3))),
        "lstm": lambda: (recurrent(), torch.randn(rows, 5, 3)),
        "cnn": lambda: (
            nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(75, 2)),
            torch.randn(rows, 2, 5, 5),
        ),
        "embedding": lambda: (
            Model(lambda m, x: m.table(x).tanh(), table=nn.Embedding(13, 3)),
            torch.randint(0, 13, (rows, 70)),
        ),
    }[kind]()
    expected = averaged(loop(model, x), RAGGED)
    tape = Tape(model, lean=lean)
    assert_equal(run(tape, x, segments=segments_of(*RAGGED)), expected, 1e-10)


@pytest.mark.parametrize("sizes", [RAGGED, [4] * 9], ids=["ragged", "equal"])
@pytest.mark.parametrize("kind", ["lstm", "linear", "cnn"])
def test_one_product_for_each_segment(monkeypatch, kind, sizes):
    """As for large layers, and with as few rows at once as there can be."""
    monkeypatch.setattr(grouped, "_SMALL", 0)
    few = functools.partial(MemoryBudget, chunk_bytes=2000)
    monkeypatch.setattr("ownerwise.gradients.tape.MemoryBudget", few)
    rows = sum(sizes)
    model, x = {
        "lstm": lambda: (recurrent(), torch.randn(rows, 5, 3)),
        "linear": lambda: (mlp(), torch.randn(rows, 4)),
        "cnn": lambda: (nn.Conv2d(2, 3, 3, padding=1), torch.randn(rows, 2, 5, 5)),
    }[kind]()
    expected = averaged(loop(model, x), sizes)
    assert_equal(run(Tape(model), x, segments=segments_of(*sizes)), expected, 1e-10)


def test_segments_of_one_row_are_records():
    model, x = mlp(), torch.randn(9, 4)
    assert_equal(run(Tape(model), x, segments=segments_of(*[1] * 9)), loop(model, x), 1e-12)


def test_a_bad_row_drops_its_whole_segment():
    model, x = mlp(), torch.randn(6, 4)
    x[2, 0] = torch.nan
    sizes = [1, 3, 2]
    good = averaged(loop(model, x[[0, 4, 5]]), [1, 2])
    for records in (
        run(Tape(model), x, segments=segments_of(*sizes)),
        by_chain(model, x, sizes),
    ):
        assert records.norms.isfinite().tolist() == [True, False, True]
        sums = records.weighted_sum(torch.ones(3))
        for parameter, gradients in good.items():
            torch.testing.assert_close(sums[parameter], gradients.sum(dim=0))


@pytest.mark.parametrize("network", ["tape", "chain"])
def test_rows_that_cancel_cost_other_segments_no_precision(network):
    """Two rows with opposite gradients of 1e6, whose sum is of ordinary length."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    x = torch.randn(40, 3)
    slopes = torch.ones(40)
    x[20] = x[21] = torch.tensor([1.0, 2.0, 3.0])
    slopes[20], slopes[21] = 1e6, -1e6 + 1
    sizes = [20, 2, 18]

    def loss(outputs):
        return (outputs * torch.tensor([1.0, 0.5])).sum(dim=1) * slopes

    segments = segments_of(*sizes)
    if network == "tape":
        records = run(Tape(model), x, loss, segments)
    else:
        chain = Chain.of(model, x)
        records = chain.backward(loss(chain.forward(x)), segments)
    weight = (x.double() * slopes[:, None].double())[:, None, :] * torch.tensor(
        [1.0, 0.5], dtype=torch.float64
    )[:, None]
    exact = torch.stack([part.mean(dim=0) for part in weight.split(sizes)])
    norms = exact.flatten(1).norm(dim=1)
    assert (records.norms.double() >= norms * (1 - 1e-5)).all()
    assert (records.norms.double() <= norms * torch.tensor([1 + 1e-5, 2, 1 + 1e-5])).all()
    with_it, without = (
        next(iter(records.weighted_sum(torch.tensor(factors)).values())).double()
        for factors in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0])
    )
    moved = float((with_it - without).norm()) / float(norms[1])
    assert moved <= 1 + 1e-4
    assert (without - exact[[0, 2]].sum(dim=0)).norm() < 1e-4 * norms[0]


@pytest.mark.parametrize("sizes", [[0], [2, 0, 1], [3, -1]])
def test_segments_without_rows_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        segments_of(*sizes)


def test_buckets_keep_padding_small():
    sizes = [1] * 40 + [64]
    segments = segments_of(*sizes)
    cells = sum(np.prod(bucket.shape) for bucket in segments.buckets)
    assert cells <= 2 * sum(sizes)
    members = np.concatenate([bucket.members for bucket in segments.buckets])
    assert sorted(members) == list(range(41))


def test_a_bucket_whose_size_is_the_mean_of_all():
    """It was taken for the only bucket: the step failed."""
    sizes = [2] * 30 + [1] * 62 + [64]
    assert sum(sizes) == 2 * len(sizes)
    model, x = recurrent(), torch.randn(sum(sizes), 2, 3)
    expected = averaged(loop(model, x), sizes)
    assert_equal(run(Tape(model, lean=True), x, segments=segments_of(*sizes)), expected, 1e-10)
