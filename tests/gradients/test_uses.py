"""Uses of parameters that hooks on layers get wrong: reuse, ties, in-place, views, plain ones."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ownerwise.gradients import Tape
from tools.record_loop import COUNT, FEW, Model, assert_equal, assert_matches_loop, loop, run


def test_reused_layer():
    """Pitfall 17: the norm is that of the sum of the uses."""
    model = Model(lambda m, x: m.layer(m.layer(m.layer(x).tanh()).tanh()), layer=nn.Linear(4, 4))
    assert_matches_loop(model, torch.randn(5, 4))
    assert_matches_loop(model, torch.randn(5, 5, 4))


@FEW
@given(COUNT, st.lists(st.sampled_from("LCNGRSTA"), min_size=1, max_size=3), st.integers(2, 3))
@example(2, ["G", "S"], 2)  # the group norm gets what the LSTM leaves, not contiguous
def test_reused_layers_of_every_kind(count, kinds, times):
    """Pitfall 17: the same layers again and again, in any order."""
    pool = {
        "L": nn.Linear(4, 4),
        "C": nn.Conv1d(4, 4, 3, padding=1),
        "N": nn.LayerNorm(4),
        "G": nn.GroupNorm(2, 4),
        "R": nn.RMSNorm([4, 4]),
        "S": nn.LSTM(4, 4, batch_first=True),
        "T": nn.GRU(4, 2, bidirectional=True, batch_first=True),
        "A": nn.MultiheadAttention(4, 2, batch_first=True),
    }

    def forward(m, x):
        for kind in kinds * times:
            layer = m.layers[kind]
            x = layer(x, x, x) if kind == "A" else layer(x)
            x = (x[0] if isinstance(x, tuple) else x).tanh()
        return x

    model = Model(forward, layers=nn.ModuleDict({kind: pool[kind] for kind in kinds}))
    assert_matches_loop(model, torch.randn(count, 4, 4))


def test_reused_convolution_and_normalisation():
    """Pitfall 17."""
    model = Model(
        lambda m, x: m.norm(m.conv(m.norm(m.conv(x)).tanh())),
        conv=nn.Conv2d(4, 4, 3, padding=1),
        norm=nn.GroupNorm(2, 4),
    )
    assert_matches_loop(model, torch.randn(4, 4, 4, 4))


def test_model_called_twice_in_one_pass():
    """Pitfall 17: both calls belong to the same records (contrastive losses)."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    pair = Model(lambda m, x: m.net(x) * m.net(x.cos()), net=model)
    assert_matches_loop(pair, torch.randn(4, 3))


@FEW
@given(COUNT, st.integers(1, 8), st.sampled_from([2, 6, 40, 200]), st.integers(1, 5), st.data())
def test_tied_embedding_and_projection(count, length, words, width, data):
    """Pitfall 17: cross terms between look-up and projection; small and large vocabulary."""
    padding = data.draw(st.sampled_from([None, 0, -1]))
    repeated = data.draw(st.booleans())
    model = Model(
        lambda m, x: m.head(m.words(x).tanh() + (m.words(x.flip(1)) if repeated else 0)),
        words=nn.Embedding(words, width, padding_idx=padding),
        head=nn.Linear(width, words, bias=data.draw(st.booleans())),
    )
    model.head.weight = model.words.weight
    x = torch.randint(0, words, (count, length))
    x[0, -1] = x[0, 0]
    assert_matches_loop(model, x)


def test_tied_by_transposition():
    """Pitfall 17: an auto-encoder; one use is of a view of the parameter."""
    model = Model(lambda m, x: (x @ m.w).tanh() @ m.w.t(), w=torch.randn(5, 3))
    assert_matches_loop(model, torch.randn(4, 5))
    model = Model(
        lambda m, x: functional.linear(functional.linear(x, m.w).tanh(), m.w.T),
        w=torch.randn(3, 5),
    )
    assert_matches_loop(model, torch.randn(4, 5))


def test_in_place_activations():
    """Pitfall 24: the gradient is that of the output before it was changed."""
    model = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LeakyReLU(0.2, inplace=True)
    )
    assert_matches_loop(model, torch.randn(4, 5))
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.ELU(inplace=True)
    )
    assert_matches_loop(model, torch.randn(4, 2, 5, 5))
    model = nn.Sequential(nn.Embedding(6, 4), nn.Hardtanh(inplace=True), nn.LayerNorm(4), nn.SiLU())
    assert_matches_loop(model, torch.randint(0, 6, (4, 3)))


def test_in_place_on_a_part_of_the_output():
    """Pitfall 24."""

    def forward(m, x):
        h = m.layer(x)
        h[:, :2].mul_(3)
        h[:, 3] = 0
        return h

    assert_matches_loop(Model(forward, layer=nn.Linear(5, 4)), torch.randn(4, 5))


def test_in_place_addition_of_a_parameter():
    def forward(m, x):
        h = m.layer(x)
        h += m.shift
        h -= m.shift[0]
        return h.tanh()

    model = Model(forward, layer=nn.Linear(3, 4), shift=torch.randn(4))
    assert_matches_loop(model, torch.randn(5, 3))


def test_outputs_used_twice():
    def forward(m, x):
        h = m.first(x)
        return m.second(h) + h.sin() * m.second(h.cos()) + h

    model = Model(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    assert_matches_loop(model, torch.randn(4, 4))


def test_views_and_other_batch_dimensions():
    """Records at dimension 1, folded before or after time: observed, not guessed."""

    def time_first(m, x):
        return m.layer(x.transpose(0, 1)).transpose(0, 1)

    def folded(m, x):
        return m.layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:2], -1)

    def folded_time_first(m, x):
        h = x.transpose(0, 1)
        return m.layer(h.reshape(-1, x.shape[-1])).view(*h.shape[:2], -1).transpose(0, 1)

    for forward in (time_first, folded, folded_time_first):
        for shape in ((4, 4, 3), (4, 6, 3), (6, 2, 3)):
            assert_matches_loop(Model(forward, layer=nn.Linear(3, 2)), torch.randn(shape))


def test_frames_folded_into_the_batch():
    def forward(m, x):
        frames = m.norm(m.conv(x.flatten(0, 1)))
        return frames.unflatten(0, x.shape[:2]).sum(dim=1)

    def frames_first(m, x):
        frames = m.norm(m.conv(x.transpose(0, 1).flatten(0, 1)))
        return frames.unflatten(0, (x.shape[1], x.shape[0])).sum(dim=0)

    for function in (forward, frames_first):
        model = Model(function, conv=nn.Conv2d(2, 4, 3), norm=nn.GroupNorm(2, 4))
        assert_matches_loop(model, torch.randn(3, 3, 2, 5, 5))


def test_plain_parameters():
    def forward(m, x):
        h = x * m.scale.exp() + m.shift
        h = torch.cat([m.token.expand(len(x), -1, -1), h], dim=1)
        h = h + m.position[: h.shape[1]]
        h = h / (1 + m.divisor.square()) - m.offset
        h = torch.where(x.mean() > 1e9, h, h * m.gate)
        return torch.lerp(h, h.cos(), m.mix) ** 2 + m.places(torch.arange(h.shape[1]))

    model = Model(
        forward,
        scale=torch.randn(()),
        shift=torch.randn(5),
        token=torch.randn(1, 1, 5),
        position=torch.randn(8, 5),
        divisor=torch.randn(1),
        offset=torch.randn(4, 1),
        gate=torch.randn(1, 1, 5),
        mix=torch.randn(5),
        places=nn.Embedding(10, 5),
    )
    assert_matches_loop(model, torch.randn(4, 3, 5))


def test_functional_calls():
    def forward(m, x):
        h = functional.linear(x, m.w, m.b)
        h = functional.layer_norm(h, (4,), m.g, m.h)
        h = torch.einsum("bi,ij->bj", h, m.v)
        return torch.addmm(m.b, h, m.v) + (m.v @ h.unsqueeze(-1)).squeeze(-1) + (h @ m.b)[:, None]

    model = Model(
        forward,
        w=torch.randn(4, 3),
        b=torch.randn(4),
        g=torch.randn(4),
        h=torch.randn(4),
        v=torch.randn(4, 4),
    )
    assert_matches_loop(model, torch.randn(6, 3))


def test_parametrised_weights():
    """Derived weights: norms are those of the parameters, not of the weight they make."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(5, 3)),
    )
    assert_matches_loop(model, torch.randn(4, 4))


def test_masked_weights():
    def forward(m, x):
        return functional.linear(x, m.w * m.mask)

    model = Model(forward, w=torch.randn(3, 4))
    model.register_buffer("mask", (torch.rand(3, 4) > 0.5).to(torch.float64))
    assert_matches_loop(model, torch.randn(5, 4))


def test_frozen_parameters_and_toggles():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(4, 4)
    tape = Tape(model)
    for frozen in ([0], [2], [4], [0, 4], []):
        for index in (0, 2, 4):
            model[index].weight.requires_grad_(index not in frozen)
            model[index].bias.requires_grad_(index not in frozen or index == 2)
        assert_equal(run(tape, x), loop(model, x))


def test_part_under_no_grad():
    def forward(m, x):
        with torch.no_grad():
            h = m.body(x)
        return m.head(h)

    model = Model(forward, body=nn.Linear(4, 3), head=nn.Linear(3, 2))
    assert_matches_loop(model, torch.randn(4, 4))


def test_input_that_requires_a_gradient():
    model = nn.Linear(4, 3)
    x = torch.randn(3, 4, requires_grad=True)
    assert_equal(run(Tape(model), x), loop(model, x.detach()))


def test_loss_with_a_penalty_inside_the_block():
    """A regulariser is part of every record's loss if it is added to each."""
    model = nn.Linear(4, 3)
    x = torch.randn(4, 4)
    tape = Tape(model)
    with tape:
        losses = model(x).square().sum(dim=1) + 0.1 * model.weight.square().sum()
    records = tape.backward(losses)

    def loss(outputs):
        return outputs.square().sum(dim=1) + 0.1 * model.weight.square().sum()

    assert_equal(records, loop(model, x, loss))


def test_block_of_zeros_filled_with_data():
    def forward(m, x):
        h = torch.zeros(len(x), 2, 3)
        h[:, 0] = x
        h[:, 1].copy_(m.layer(x))
        return m.layer(h)

    assert_matches_loop(Model(forward, layer=nn.Linear(3, 3)), torch.randn(4, 3))


def test_cast_to_the_type_of_a_parameter():
    model = Model(lambda m, x: m.layer(x.to(m.layer.weight)), layer=nn.Linear(3, 2))
    assert_matches_loop(model, torch.randn(4, 3))


def test_view_after_a_convolution():
    """The inner channels-last format must not show: `view` works as on a contiguous tensor."""
    model = Model(
        lambda m, x: m.head(m.conv(x).relu().view(x.size(0), -1)),
        conv=nn.Conv2d(2, 3, 3),
        head=nn.Linear(27, 2),
    )
    assert_matches_loop(model, torch.randn(4, 2, 5, 5))
