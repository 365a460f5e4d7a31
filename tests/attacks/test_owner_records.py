"""Record sampling, whole owners removed: each drawn record moves the sum by at most a clip norm."""

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

OWNERS, EACH, FEATURES = 8, 6, 5
METHODS = ("uniform", "sample", "scale", "both")
KINDS = ("linear", "mlp", "convolution")
TAILS = (None, 0.4, 1.5)
RULES = (None, ow.AutoS(), ow.Psac())
SIZES = (None, 1, 4)


@functools.cache
def plan_of(method: str, several: bool) -> ow.Plan:
    """Eight owners with six records each; if `several`, they share most of them by two or three."""
    rows = [(owner,) for owner in range(OWNERS) for _ in range(2 if several else EACH)]
    if several:
        rows += [(o, (o + 1) % OWNERS) for o in range(OWNERS)]
        rows += [(o, (o + 3) % OWNERS, (o + 4) % OWNERS) for o in range(OWNERS)] * 2
    owners = ow.Owners(rows, dict(enumerate(np.geomspace(0.5, 8.0, OWNERS))), 1e-7)
    return ow.plan(owners, method, unit="owner", sampling="record", steps=4, batch_size=12)


def network(kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Linear(FEATURES, 3)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(FEATURES, 9), nn.ReLU(), nn.Linear(9, 3))
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3)
    )


@functools.cache
def step_of(method, several, kind, tail, rule, size) -> ow.PrivateStep:
    torch.manual_seed(KINDS.index(kind))
    model = network(kind)
    return ow.PrivateStep(
        model,
        plan_of(method, several),
        torch.optim.SGD(model.parameters(), lr=0.1),
        functional.cross_entropy,
        weights=None if tail is None else ow.INO(tail=tail),
        clipping=RULES[rule],
        performance=ow.Performance(micro_batch_size=SIZES[size]),
    )


def largest_movement(seed: int, several: bool, removals: int = 1) -> float:
    """Remove some owners from a batch; return the worst movement, relative to i C_o for i records.

    A batch has any number of the records. Inputs have sizes from 1e-3 to 1e3, ties and twins.
    """
    random = np.random.default_rng(seed)
    step = step_of(
        METHODS[seed % 4],
        several,
        KINDS[seed % 3],
        TAILS[0] if seed % 2 else TAILS[random.integers(1, 3)],
        int(random.integers(3)),
        int(random.integers(3)),
    )
    plan = step.plan
    index = plan.owners.record_owner_index
    rows = np.flatnonzero(random.random(len(index)) < random.uniform(0.05, 1.0))
    inputs = random.standard_normal((len(index), FEATURES)) * 10.0 ** random.uniform(-3, 3)
    if random.random() < 0.3:
        inputs[:] = inputs[0]
    if random.random() < 0.3:
        inputs[1::2] = -inputs[: 2 * (len(inputs) // 2) : 2]
    inputs = torch.tensor(inputs, dtype=torch.float32)
    targets = torch.tensor(random.integers(0, 3, len(index)))

    def total(kept: np.ndarray) -> torch.Tensor:
        return flat(step.clipped_sum(Batch(0, kept, index[kept], (inputs[kept], targets[kept]))))

    holders = [(owner,) for owner in range(OWNERS)]
    holders += plan.shared.sets() if several else []
    whole, worst = total(rows), 0.0
    for removed in random.permutation(OWNERS)[:removals]:
        own = np.array([removed in holders[at] for at in index[rows]], dtype=bool)
        if own.any():
            moved = float((whole - total(rows[~own])).norm())
            least = plan.holders.clip_norms[index[rows[own]]]
            assert (least <= plan.clip_norms[removed]).all()
            worst = max(worst, moved / float(least.sum()))  # at most i C_o
    return worst


@pytest.mark.parametrize("several", [False, True], ids=["one owner", "several owners"])
def test_removing_an_owner_from_random_batches(several):
    worst = [largest_movement(seed, several, 3) for seed in range(24)]
    assert max(worst) <= 1
    assert max(worst) > 0.99


@pytest.mark.long
@pytest.mark.parametrize("several", [False, True], ids=["one owner", "several owners"])
def test_removing_an_owner_from_ten_thousand_batches(several):
    assert max(largest_movement(seed, several) for seed in range(48, 10_048)) <= 1
