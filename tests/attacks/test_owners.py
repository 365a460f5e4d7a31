"""Whole owners removed from crafted and random batches: the sum moves by at most a clip norm."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import Batch
from tools.step_tools import flat, one_thread

_one_thread = pytest.fixture(autouse=True)(one_thread)

OWNERS = 12
METHODS = ("uniform", "sample", "scale", "both")


@functools.cache
def plan_of(method: str) -> ow.Plan:
    budgets = dict(enumerate(np.geomspace(0.5, 8.0, OWNERS)))
    owners = ow.Owners(np.arange(OWNERS), budgets, 1e-7)
    return ow.plan(owners, method, unit="owner", steps=4, batch_size=6, records_per_owner=None)


def network(kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Linear(5, 3)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3)
    )


def random_batch(random: np.random.Generator):
    """Some owners with 1 to 6 records each: sizes from 1e-3 to 1e3, ties, opposite twins."""
    present = np.sort(random.choice(OWNERS, random.integers(1, OWNERS + 1), replace=False))
    owner = np.repeat(present, random.integers(1, 7, len(present)))
    inputs = random.standard_normal((len(owner), 5)) * 10.0 ** random.uniform(-3, 3)
    if random.random() < 0.3:
        inputs[:] = inputs[0]
    if random.random() < 0.3:
        inputs[1::2] = -inputs[: 2 * (len(inputs) // 2) : 2]
    targets = random.integers(0, 3, len(owner))
    return owner, torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets)


def largest_movement(seed: int) -> float:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    plan = plan_of(METHODS[seed % 4])
    model = network(("linear", "mlp", "convolution")[seed % 3])
    weights = None if seed % 2 else ow.INO(tail=random.uniform(0, 2))
    rule = (None, ow.AutoS(), ow.Psac())[random.integers(3)]
    size = (None, 1, 4)[random.integers(3)]
    step = ow.PrivateStep(
        model,
        plan,
        torch.optim.SGD(model.parameters(), lr=0.1),
        functional.cross_entropy,
        weights=weights,
        clipping=rule,
        performance=ow.Performance(micro_batch_size=size),
    )
    owner, inputs, targets = random_batch(random)

    def total(kept: np.ndarray) -> torch.Tensor:
        rows = np.flatnonzero(np.isin(owner, kept))
        data = inputs[rows], targets[rows]
        return flat(step.clipped_sum(Batch(0, rows, owner[rows], data, by_owner=True)))

    present = np.unique(owner)
    whole = total(present)
    return max(
        float((whole - total(present[present != removed])).norm()) / float(plan.clip_norms[removed])
        for removed in present
    )


def test_removing_an_owner_from_random_batches():
    worst = [largest_movement(seed) for seed in range(48)]
    assert max(worst) <= 1
    assert max(worst) > 0.99


@pytest.mark.long
def test_removing_an_owner_from_ten_thousand_batches():
    assert max(largest_movement(seed) for seed in range(48, 10_048)) <= 1


@pytest.mark.parametrize("weights", [None, ow.INO(tail=0.5)], ids=["plain", "ino"])
@pytest.mark.parametrize("ratio", [1.0, 29.0, 900.0, 1e5])
def test_records_of_an_owner_that_nearly_cancel(ratio, weights):
    """An owner's records may be far longer than their mean; others must not feel their rounding."""
    each, width = 6, 400
    plan = plan_of("scale")
    torch.manual_seed(0)
    common, opposite = torch.randn(OWNERS, 1, width), torch.randn(OWNERS, 1, width)
    signs = torch.tensor([1.0, -1.0] * (each // 2))[None, :, None]
    inputs = (5 * common + ratio * signs * opposite).reshape(-1, width) / width**0.5
    model = nn.Sequential(nn.Linear(width, 60), nn.Flatten(), nn.Linear(60, 1))

    def loss(outputs, targets, reduction="none"):
        return outputs[:, 0] + 3.0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, plan, optimizer, loss, weights=weights)
    owner = np.repeat(np.arange(OWNERS), each)

    def total(rows: np.ndarray) -> torch.Tensor:
        data = inputs[rows], torch.zeros(len(rows))
        return flat(step.clipped_sum(Batch(0, rows, owner[rows], data, by_owner=True)))

    whole = total(np.arange(len(owner)))
    for removed in range(OWNERS):
        moved = float((whole - total(np.flatnonzero(owner != removed))).norm())
        assert moved <= plan.clip_norms[removed]
