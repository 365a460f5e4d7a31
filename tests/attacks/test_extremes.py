"""Numbers at the ends of float32: squares that vanish must not lengthen a contribution."""

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.gradients.precision import HUGE
from ownerwise.mechanisms import SMALLEST_NORM, Randomness
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

FEATURES = 784


class Accepts:
    """Random numbers with which every record whose norm can be told is accepted."""

    def uniforms(self, count):
        return np.zeros(count)


class Tokens(nn.Module):
    """The same layer on two tokens, for Gram matrices."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, None, :].expand(-1, 2, -1).contiguous()).mean(1)


WRAPS = {
    "chain": lambda layer: layer,
    "vector": lambda layer: nn.Sequential(layer, nn.Identity()),
    "tokens": Tokens,
}


def exact_sum(step, inputs, slope):
    """The oracle: the record's gradient is slope times its features; add it up in float64."""
    (factor,) = step.peek.factors
    return factor * slope * inputs.double().norm()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("feature", [1e-30, 3e-24, 2.5e-23, 1e-22, 1e-19, 1e-10])
@pytest.mark.parametrize("slope", [1.0, 0.9 * HUGE, 8e11])
@pytest.mark.parametrize(
    "rule",
    [ow.Standard(), ow.AutoS(SMALLEST_NORM), ow.Psac(SMALLEST_NORM), ow.ImportanceSampling()],
    ids=repr,
)
def test_vanishing_squares_stay_within_the_smallest_clip_norm(rule, slope, feature, wrap):
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, 1, bias=False)
    owners = ow.Owners(np.zeros(50, dtype=int), {0: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=1, batch_size=10, clip_norm=SMALLEST_NORM)
    model = WRAPS[wrap](layer)
    step = tools.make_step(
        model, lambda out, y: slope * out[:, 0], plan=plan, clipping=rule, not_private=True
    )
    inputs = torch.full((1, FEATURES), feature)
    batch = ow.Batch(0, np.array([0]), np.array([0]), (inputs, torch.zeros(1)))
    total = tools.flat(step.clipped_sum(batch, Randomness(rule=Accepts())))
    assert torch.isfinite(total).all()
    assert float(total.norm()) <= SMALLEST_NORM * (1 + 1e-4)
    assert float(exact_sum(step, inputs, slope)) <= SMALLEST_NORM * (1 + 1e-4) or not total.any()


@pytest.mark.parametrize("value", [1e-46, 1e-39, 1e-12, 1e-10, 0.99 * SMALLEST_NORM])
def test_constants_below_the_smallest_norm_are_refused(value):
    with pytest.raises(ValueError, match="stability must be at least 1e-06"):
        ow.AutoS(value)
    with pytest.raises(ValueError, match="r must be at least 1e-06"):
        ow.Psac(value)
    owners = ow.Owners(np.zeros(50, dtype=int), {0: 4.0}, 1e-5)
    with pytest.raises(ow.OwnerwiseError, match="clip_norm"):
        ow.plan(owners, "uniform", steps=1, batch_size=10, clip_norm=value)


def test_individual_clip_norms_below_the_smallest_norm_are_refused():
    owners = ow.Owners(np.repeat([0, 1], [500, 500]), {0: 0.1, 1: 40.0}, 1e-5)
    plan = ow.plan(owners, "scale", steps=2, batch_size=10, clip_norm=2 * SMALLEST_NORM)
    assert plan.clip_norms.min() < SMALLEST_NORM
    model = nn.Linear(3, 1)
    with pytest.raises(ow.OwnerwiseError, match=r"clip norms down to .* at least 1e-06"):
        ow.PrivateStep(
            model, plan, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, y: out[:, 0]
        )


def test_importance_sampling_has_no_jump_where_norms_can_no_longer_be_told():
    """Just above the threshold, almost nothing is accepted: a last bit moves no record by C."""
    rule = ow.ImportanceSampling()
    clip, count = 1.0, 200_000
    threshold = float(torch.finfo(torch.float32).eps ** 0.5)
    for ratio, most in ((1 - 1e-7, 0), (1 + 1e-6, 0), (1 + 1e-3, 3)):
        norms = torch.full((count,), ratio * threshold, dtype=torch.float32)
        stream = ow.SecretStream.from_seed(0).at_step(0)
        factors = rule.factors(norms, torch.full_like(norms, clip), stream)
        assert int(factors.count_nonzero()) <= most
    stream = ow.SecretStream.from_seed(1).at_step(0)
    norms = torch.full((count,), 0.25)
    share = float((rule.factors(norms, torch.ones(count), stream) > 0).double().mean())
    assert share == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / count) ** 0.5 + 3e-4)
