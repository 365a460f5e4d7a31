"""Plain parameters against the loop over records, at random shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tools.record_loop import COUNT, FEW, Model, assert_matches_loop

CALLS = {
    "scale": lambda x, p: x * p,
    "scale on the left": lambda x, p: p.exp() * x,
    "bias": lambda x, p: x + p,
    "bias times two": lambda x, p: torch.add(x, p, alpha=2),
    "less": lambda x, p: x - p,
    "less on the left": lambda x, p: p - x,
    "divisor": lambda x, p: x / (1 + p.square()),
    "dividend": lambda x, p: p / (1 + x.square()),
    "exponent": lambda x, p: (1 + x.square()) ** p,
    "mixture": lambda x, p: torch.lerp(x, x.cos(), p),
    "choice": lambda x, p: torch.where(x > 0, x, p),
    "floor": lambda x, p: torch.maximum(x, p),
    "product added": lambda x, p: torch.addcmul(x, x.cos(), p),
    "twice": lambda x, p: x * p + p,
}


@pytest.mark.parametrize("call", CALLS)
@FEW
@given(COUNT, st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=3), st.data())
def test_plain_parameter_of_any_shape(call, count, dimensions, data):
    """A parameter is repeated along some dimensions, given as 1 or left out in front."""
    sizes = [size for size, _ in dimensions]
    shape = [1, *[1 if repeat else size for size, repeat in dimensions]]
    while shape and shape[0] == 1 and data.draw(st.booleans()):
        del shape[0]
    model = Model(lambda m, x: CALLS[call](x, m.p), p=torch.randn(shape))
    assert_matches_loop(model, torch.randn(count, *sizes))


@FEW
@given(COUNT, st.integers(1, 5), st.integers(1, 4), st.data())
def test_positions_and_tokens(count, length, width, data):
    """Positional embeddings (sliced, looked up, expanded) and a class token, before a layer."""
    kind = data.draw(st.sampled_from(["sliced", "looked up", "expanded"]))
    last = data.draw(st.booleans())

    def forward(m, x):
        token = m.token.expand(len(x), -1, -1)
        h = torch.cat([x, token] if last else [token, x], dim=1)
        steps = h.shape[1]
        if kind == "sliced":
            h = h + m.positions.weight[:steps]
        elif kind == "looked up":
            h = h + m.positions(torch.arange(steps))
        else:
            h = h + m.positions.weight[None, :steps].expand(len(x), -1, -1)
        return m.layer(h)

    model = Model(
        forward,
        token=torch.randn(1, 1, width),
        positions=nn.Embedding(8, width),
        layer=nn.Linear(width, 2),
    )
    assert_matches_loop(model, torch.randn(count, length, width))


def test_scalar_used_twice():
    model = Model(lambda m, x: x * m.p + m.p, p=torch.randn(()))
    assert_matches_loop(model, torch.randn(3, 4))
