"""Layers against the loop over records, at random shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ownerwise.gradients import Tape
from tools.record_loop import COUNT, FEW, Model, assert_equal, assert_matches_loop, loop, run

# torch warns that even kernels need a padded copy; the values are what matters here
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@FEW
@given(COUNT, st.lists(st.integers(1, 5), max_size=3), st.integers(1, 6), st.booleans())
def test_linear_at_any_rank(count, inner, width, bias):
    """Pitfall 18: ranks 2 to 5; equal sizes of other dimensions and batch included."""
    model = nn.Sequential(nn.Linear(4, width, bias=bias), nn.Tanh(), nn.Linear(width, 3))
    assert_matches_loop(model, torch.randn(count, *inner, 4))


def test_linear_by_every_plan():
    """Long sequences with narrow layers form gradients, short ones with wide layers do not."""
    for length, width in ((40, 3), (2, 40)):
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        assert_matches_loop(model, torch.randn(4, length, width))


@FEW
@given(st.data())
def test_convolution(data):
    rank = data.draw(st.integers(1, 3))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    kernel = data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(1, 2))
    dilation = data.draw(st.integers(1, 2))
    padding = data.draw(st.sampled_from([0, 1, "same", "valid"]))
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    if padding == "same":
        stride = 1
    if rank == 3 and mode == "reflect":
        mode = "zeros"
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model = nn.Sequential(
        kind(4, 8, kernel, stride, padding, dilation, groups, padding_mode=mode),
        nn.ReLU(inplace=True),
        kind(8, 3, 1, bias=False),
    )
    assert_matches_loop(model, torch.randn(data.draw(COUNT), 4, *[6] * rank))


def test_convolution_with_uneven_padding():
    model = nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2))
    assert_matches_loop(model, torch.randn(3, 2, 7, 8))
    model = nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 2))
    assert_matches_loop(model, torch.randn(3, 2, 7, 8))


def test_convolutions_that_pad_unevenly_do_not_share_memory():
    """Kernels of 3 and 4, "same", on lengths that vary by one: equal sizes, other places."""
    torch.manual_seed(0)
    short, long = (nn.Conv1d(2, 3, kernel, padding="same").double() for kernel in (3, 4))
    model = Model(
        lambda m, x: torch.cat([m.short(x).tanh().mean(2), m.long(x).tanh().mean(2)], 1),
        short=short, long=long,
    )  # fmt: skip
    tape = Tape(model, lean=True)
    for length in (13, 12, 13, 12):
        x = torch.randn(4, 2, length, dtype=torch.float64)
        assert_equal(run(tape, x), loop(model, x))


def test_convolution_by_ghost_norm():
    """Few positions and many channels: the Gram matrices are cheaper."""
    model = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.Tanh(), nn.Conv2d(24, 16, 3))
    assert_matches_loop(model, torch.randn(5, 16, 3, 3))


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_transposed_convolution_by_fallback(kind):
    rank = 1 if kind is nn.ConvTranspose1d else 2
    model = nn.Sequential(kind(3, 4, 3, stride=2, padding=1), nn.Tanh())
    assert_matches_loop(model, torch.randn(4, 3, *[5] * rank))


@FEW
@given(COUNT, st.integers(1, 8), st.sampled_from([None, 0, 2, -1]))
def test_embedding(count, length, padding):
    """Pitfall 33: rows of padding get nothing; repeated words are added before the norm."""
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.Tanh(), nn.Linear(4, 2))
    assert_matches_loop(model, torch.randint(0, 7, (count, length)))


def test_embedding_of_long_sequences():
    model = nn.Sequential(nn.Embedding(50, 3), nn.Tanh())
    assert_matches_loop(model, torch.randint(0, 50, (3, 100)))


MODES = ["sum", "mean", "max"]


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", MODES)
def test_embedding_bag(mode, padding):
    bag = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding)
    ids = torch.randint(0, 9, (4, 3))
    ids[0] = 2
    assert_matches_loop(bag, ids)
    with Tape(bag):
        ours = bag(ids)
    torch.testing.assert_close(ours, bag(ids))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_embedding_bag_with_offsets(mode, last):
    """Bags of different lengths: each row lists how many of its ids count; one is empty."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=last)

        def forward(self, x):
            rows = [row[1 : 1 + row[0]] for row in x]
            ends = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
            flat = torch.cat(rows)
            return self.bag(flat, ends if last else ends[:-1])

    x = torch.randint(0, 9, (5, 7))
    x[:, 0] = torch.tensor([3, 6, 0, 1, 5])
    model = Bags()
    assert_matches_loop(model, x)
    assert_matches_loop(model, x[2:3])
    with Tape(model):
        ours = model(x)
    torch.testing.assert_close(ours, model(x))


def test_embedding_bag_with_weights():
    bag = Model(
        lambda m, x: m.bag(
            (x.flatten() > 0).long() + 2,
            torch.arange(0, x.numel(), 3),
            per_sample_weights=x.flatten(),
        ),
        bag=nn.EmbeddingBag(9, 4, mode="sum"),
    )
    assert_matches_loop(bag, torch.randn(4, 3))


@FEW
@given(COUNT, st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_prelu_by_fallback(count, channels, inner, shared):
    layer = nn.PReLU(1 if shared else channels)
    assert_matches_loop(layer, torch.randn(count, channels, *inner))


@FEW
@given(COUNT, st.lists(st.integers(1, 4), max_size=2), st.integers(1, 4), st.booleans())
def test_bilinear_by_fallback(count, inner, width, bias):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Bilinear(3, 3, width, bias=bias)

        def forward(self, x):
            return self.layer(x, x.cos())

    assert_matches_loop(Model(), torch.randn(count, *inner, 3))


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layers(training):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0)

        def forward(self, x):
            memory = self.encoder(x).transpose(0, 1)
            return self.decoder(x.transpose(0, 1), memory).transpose(0, 1)

    assert_matches_loop(Both().train(training), torch.randn(4, 4, 8))


@pytest.mark.parametrize("trained", ["weight", "bias", "both", "neither"])
@pytest.mark.parametrize("length", [1, 3])
def test_addmm(trained, length):
    """The layers of GPT-2: rows of all records together, with either part frozen."""
    model = Model(
        lambda m, x: m.last(torch.addmm(m.b, x.reshape(-1, 4), m.w).view(*x.shape[:2], 5)).sum(1),
        w=torch.randn(4, 5),
        b=torch.randn(5),
        last=nn.Linear(5, 2),
    )
    model.w.requires_grad_(trained in ("weight", "both"))
    model.b.requires_grad_(trained in ("bias", "both"))
    assert_matches_loop(model, torch.randn(3, length, 4))
    assert_matches_loop(model, torch.randn(1, length, 4))


def test_addmm_with_other_arguments():
    model = Model(
        lambda m, x: torch.addmm(x, x, m.w) + torch.addmm(m.b, x, m.w, beta=0.5, alpha=2),
        w=torch.randn(4, 4),
        b=torch.randn(4),
    )
    assert_matches_loop(model, torch.randn(3, 4))
