"""Every rule against the loop over records, at random shapes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_loop import assert_matches_loop
from torch import nn

# torch warns that even kernels need a padded copy; the values are what matters here
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
COUNT = st.integers(1, 5)


@FEW
@given(COUNT, st.lists(st.integers(1, 5), max_size=3), st.integers(1, 6), st.booleans())
def test_linear_at_any_rank(count, inner, width, bias):
    """Trap 18: ranks 2 to 5; equal sizes of other dimensions and batch included."""
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
    """Trap 33: rows of padding get nothing; repeated words are added before the norm."""
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.Tanh(), nn.Linear(4, 2))
    assert_matches_loop(model, torch.randint(0, 7, (count, length)))


def test_embedding_of_long_sequences():
    model = nn.Sequential(nn.Embedding(50, 3), nn.Tanh())
    assert_matches_loop(model, torch.randint(0, 50, (3, 100)))


def test_embedding_bag_by_fallback():
    assert_matches_loop(nn.EmbeddingBag(9, 4, mode="sum"), torch.randint(0, 9, (4, 3)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(6), (4, 6)),
        (nn.LayerNorm(6), (4, 4, 3, 6)),
        (nn.LayerNorm([3, 6]), (4, 4, 3, 6)),
        (nn.LayerNorm(6, bias=False), (4, 3, 6)),
        (nn.GroupNorm(3, 6), (4, 6)),
        (nn.GroupNorm(2, 6), (4, 6, 5)),
        (nn.GroupNorm(1, 6), (4, 6, 4, 4)),
        (nn.InstanceNorm1d(6, affine=True), (4, 6, 5)),
        (nn.InstanceNorm2d(6, affine=True), (4, 6, 4, 4)),
        (nn.InstanceNorm3d(6, affine=True), (4, 6, 2, 2, 3)),
        (nn.RMSNorm(6), (4, 3, 6)),
        (nn.RMSNorm([3, 6], eps=1e-3), (4, 3, 6)),
        (nn.BatchNorm1d(6).eval(), (4, 6, 5)),
        (nn.BatchNorm2d(6).eval(), (4, 6, 4, 4)),
        (nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(), (4, 6, 5)),
        (nn.PReLU(6), (4, 6, 5)),
        (nn.Bilinear(6, 6, 3), (4, 6)),
    ],
    ids=str,
)
def test_normalisation_and_others(layer, shape):
    layer.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x.cos()) if isinstance(layer, nn.Bilinear) else self.layer(x)

    assert_matches_loop(Model(), torch.randn(shape) * 2 + 1)


class Recurrent(nn.Module):
    def __init__(self, kind, batch_first, **options):
        super().__init__()
        self.batch_first = batch_first
        self.layer = kind(3, 4, batch_first=batch_first, **options)
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 2)

    def forward(self, x):
        outputs, last = self.layer(x if self.batch_first else x.transpose(0, 1))
        if not self.batch_first:
            outputs = outputs.transpose(0, 1)
        states = last if isinstance(last, tuple) else (last,)
        ends = [state.transpose(0, 1).flatten(1) for state in states]
        return torch.cat([self.head(outputs).flatten(1), *ends], dim=1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "num_layers": 2}],
    ids=["plain", "deep", "no bias"],
)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent(kind, options, batch_first):
    model = Recurrent(kind, batch_first, **options)
    for shape in ((4, 4, 3), (3, 5, 3), (1, 2, 3)):  # the first: as many steps as records
        assert_matches_loop(model, torch.randn(shape))


def test_recurrent_with_relu():
    assert_matches_loop(Recurrent(nn.RNN, True, nonlinearity="relu"), torch.randn(4, 5, 3))


def test_recurrent_values_are_torchs():
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        from ownerwise.gradients import Tape

        model = Recurrent(kind, True, num_layers=2, bidirectional=True)
        x = torch.randn(3, 5, 3)
        with Tape(model):
            ours = model(x)
        torch.testing.assert_close(ours, model(x), rtol=1e-12, atol=1e-12)


def test_recurrent_dropout_keeps_the_scale():
    from ownerwise.gradients import Tape

    model = nn.LSTM(3, 64, num_layers=2, dropout=0.5)
    with Tape(model):
        outputs, _ = model(torch.randn(5, 4, 3))
    assert outputs.isfinite().all()


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells(kind):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(3, 4)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0] if isinstance(state, tuple) else state

    assert_matches_loop(Steps(), torch.randn(4, 3, 3))


class Attending(nn.Module):
    def __init__(self, batch_first, need_weights, cross, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.batch_first, self.need_weights, self.cross = batch_first, need_weights, cross

    def forward(self, x):
        length = x.shape[1]
        padding = torch.zeros(x.shape[0], length, dtype=torch.bool)
        padding[:, -1] = True
        query = x if self.batch_first else x.transpose(0, 1)
        key = value = query
        if self.cross:
            key = query[..., : self.layer.kdim].cos()
            value = query[..., : self.layer.vdim].sin()
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs, _ = self.layer(
            query, key, value, padding, need_weights=self.need_weights, attn_mask=mask
        )
        return outputs if self.batch_first else outputs.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("cross", "options"),
    [
        (False, {}),
        (False, {"bias": False}),
        (False, {"add_bias_kv": True, "add_zero_attn": True}),
        (True, {}),
        (True, {"kdim": 5, "vdim": 7}),
    ],
    ids=["self", "no bias", "extra keys", "cross", "other widths"],
)
def test_attention(batch_first, need_weights, cross, options):
    model = Attending(batch_first, need_weights, cross, **options)
    for shape in ((4, 4, 8), (3, 5, 8)):
        x = torch.randn(shape)
        assert_matches_loop(model, x)


def test_attention_values_are_torchs():
    from ownerwise.gradients import Tape

    for cross, options in (
        (False, {}),
        (True, {"kdim": 5, "vdim": 7}),
        (False, {"add_bias_kv": 1}),
    ):
        model = Attending(True, True, cross, **options)
        x = torch.randn(3, 5, 8)
        with Tape(model):
            ours = model(x)
        torch.testing.assert_close(ours, model(x), rtol=1e-12, atol=1e-12)


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
