"""A record whose terms cancel in part: its computed norm must not be too small.

Tokens that pull in opposite directions make the terms of a gradient up to a thousand times longer
than their sum, so the rounding errors of inner products and sums count for that much more. Norms
from Gram matrices were too small by up to 0.3%, and those of formed gradients by 0.01%.
"""

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.step.rounding import GRID_ROOM
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

RECORDS = 6
# time steps, inputs and outputs of the layer; whether there are only two kinds of terms
SHAPES = {
    "few wide tokens": (2, 4096, 64, False),
    "few very wide tokens": (2, 30_000, 30, False),
    "few tokens, wide outputs": (2, 64, 4096, False),
    "as many inputs as outputs": (4, 1024, 1024, False),
    "two kinds of tokens": (64, 512, 512, True),
    "formed": (120, 256, 256, False),
}


def opposed(time, ratio, kinds, generator):
    """Return constant inputs and slopes `[records, time, 1]` whose products nearly cancel."""
    factors = generator.uniform(0.9, 1.1, (2, RECORDS, time, 1))
    if kinds:
        factors = np.repeat(factors[:, :, :2], time // 2, axis=2)
    x, y = generator.uniform(0.5, 2, (2, RECORDS, 1, 1)) * factors
    y[:, time // 2 :] *= -1
    products = x * y
    y[:, -1:] -= (products.sum(1) - np.abs(products).sum(1) / ratio)[:, None] / x[:, -1:]
    return torch.tensor(x).float(), torch.tensor(y).float()


@pytest.mark.parametrize("ratio", [5.0, 25.0, 900.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_terms_that_cancel_in_part_stay_within_the_clip_norm(shape, ratio):
    """In float64, with what rounding to the noise grid may add."""
    time, inputs, outputs, kinds = SHAPES[shape]
    owners = ow.Owners(np.zeros(4 * RECORDS, dtype=int), {0: 8.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=2, batch_size=RECORDS, clip_norm=1e-3)
    step = tools.make_step(
        nn.Linear(inputs, outputs, bias=False),
        lambda out, y: (out * y).sum((1, 2)),
        plan=plan,
        performance=ow.Performance(lean=True),
    )
    most = float(plan.clip_norms[0]) * (1 - GRID_ROOM)
    generator = np.random.default_rng(time + inputs)
    for _ in range(3):
        x, y = opposed(time, ratio, kinds, generator)
        x, y = x.expand(-1, -1, inputs), y.expand(-1, -1, outputs)

        def total(rows, x=x, y=y):
            batch = ow.Batch(0, rows, 0 * rows, (x[rows], y[rows]))
            return tools.flat(step.clipped_sum(batch))

        everybody = np.arange(RECORDS)
        whole = total(everybody)
        for removed in everybody:
            moved = float((whole - total(np.delete(everybody, removed))).norm())
            assert 0.9 * most < moved <= most
