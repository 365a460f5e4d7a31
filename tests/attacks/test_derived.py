"""Derived parameters whose derivation cancels almost all of a gradient, in float32.

Weight standardisation removes the mean of a weight, and with it the part of a gradient that comes
from features with a large common offset. Rounded before it is removed, the sum of 4,000 such
gradients moved by up to 14 clip norms.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

RECORDS = 1000
OWNERS = ow.Owners(np.zeros(2 * RECORDS, dtype=int), {0: 4.0}, 1e-5)


class Centred(nn.Module):
    """gain * (w - mean of w), and the weight itself if asked."""

    def __init__(self, gain, itself=False):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, 8))
        self.gain, self.itself = gain, itself

    def forward(self, x):
        centred = self.gain * (self.weight - self.weight.mean(1, keepdim=True))
        out = functional.linear(x, centred)
        return out - self.gain * functional.linear(x * 1e-4, self.weight) if self.itself else out


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize(("gain", "slope"), [(1.0, 1e-2), (1e2, 1e-4), (1e4, 1e-5)])
def test_one_record_moves_the_sum_by_its_clip_norm_alone(gain, slope, itself, hardened):
    torch.manual_seed(0)
    options = {"steps": 2, "batch_size": RECORDS, "clip_norm": 1e-3, "hardened": hardened}
    plan = ow.plan(OWNERS, "uniform", **options)
    model = Centred(gain, itself)
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy
    )
    inputs = 1 + slope * torch.linspace(0.1, 1, 8) * (1 + 0.02 * torch.rand(RECORDS, 8))
    targets = torch.zeros(RECORDS, dtype=torch.long)

    def total(removed=None):
        chosen = np.arange(RECORDS)
        chosen = chosen if removed is None else np.delete(chosen, removed)
        batch = ow.Batch(0, chosen, 0 * chosen, (inputs[chosen], targets[chosen]))
        rows = tools.CoupledRows(plan.hardened_rows, removed) if hardened else None
        return tools.flat(step.clipped_sum(batch, ow.mechanisms.Randomness(rows=rows)))

    whole = total()
    moved = max(float((whole - total(removed)).norm()) for removed in (0, 1, 500))
    assert moved <= float(plan.clip_norms[0])
