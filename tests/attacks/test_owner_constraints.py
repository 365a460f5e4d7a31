"""Rate constraints and an adaptive clip norm with the owner as the unit: owners are removed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.batches import Batch
from ownerwise.mechanisms import Randomness
from tools.step_tools import flat, one_thread

_one_thread = pytest.fixture(autouse=True)(one_thread)

OWNERS, EACH = 12, 6
SAMPLINGS = [("gaussian", "owner"), ("gaussian", "record"), ("laplace", "owner")]


def constrained_step(noise: str, sampling: str, method: str, seed: int):
    budgets = dict(enumerate(np.geomspace(0.5, 8.0, OWNERS)))
    owners = ow.Owners(np.repeat(np.arange(OWNERS), EACH), budgets, 1e-7)
    part = ow.Partition({"sex": ("F", "M")}, classes=3)
    fair = ow.RateConstraints(ow.constraints.demographic_parity(part, "sex", max_gap=0.1))
    plan = ow.plan(
        owners, method, unit="owner", sampling=sampling, steps=4, batch_size=6,
        constraints=fair, release_noise=noise,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1),
        fair.penalised(functional.cross_entropy), release=fair,
        weights=None if seed % 2 else ow.INO(tail=0.6),
        performance=ow.Performance(micro_batch_size=(None, 1, 5)[seed % 3]),
    )  # fmt: skip


@pytest.mark.parametrize(("noise", "sampling"), SAMPLINGS)
@pytest.mark.parametrize("method", ["sample", "scale"])
def test_an_owner_moves_histogram_and_gradient_by_at_most_what_is_paid(noise, sampling, method):
    """Given the same noised histogram: i records move each sum by at most i times their bound."""
    moves = {"histogram": 0.0, "gradient": 0.0}
    for seed in range(6):
        step = constrained_step(noise, sampling, method, seed)
        plan, sums, random = step.plan, step._sums, np.random.default_rng(seed)
        owner = np.repeat(np.arange(OWNERS), random.integers(1, EACH + 1, OWNERS))
        inputs = random.standard_normal((len(owner), 5)) * 10.0 ** random.uniform(-2, 3)
        if seed == 3:
            inputs[:] = inputs[0]
        data = torch.tensor(inputs, dtype=torch.float32)
        targets = [random.integers(0, count, len(owner)) for count in (3, 2)]
        targets = torch.tensor(np.stack(targets, axis=1))
        state, seen = copy.deepcopy(step.release.state()), []
        fixed = 5 * torch.rand(2, 3, dtype=torch.float64)

        def total(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            step.release.load_state(state)  # noqa: B023
            batch = Batch(0, rows, owner[rows], (data[rows], targets[rows]),  # noqa: B023
                          by_owner=sampling == "owner")  # fmt: skip
            noised = Randomness(release=lambda h: seen.append(h.clone()) or fixed)  # noqa: B023
            return flat(sums(batch, noised)), seen[-1]  # noqa: B023

        gradient, histogram = total(np.arange(len(owner)))
        for removed in random.permutation(OWNERS)[:4]:
            own = owner == removed
            others, rest = total(np.flatnonzero(~own))
            drawn = 1 if sampling == "owner" else int(own.sum())
            order = 1 if noise == "laplace" else 2
            moved = float(torch.linalg.vector_norm(histogram - rest, ord=order))
            share = float(plan.release_sensitivities[removed])
            moves["histogram"] = max(moves["histogram"], moved / drawn / share)
            moved = float((gradient - others).norm())
            moves["gradient"] = max(moves["gradient"], moved / drawn / plan.clip_norms[removed])
    assert 0.5 < moves["histogram"] <= 1
    assert 0.9 < moves["gradient"] <= 1


@pytest.mark.parametrize("sampling", ["owner", "record"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": "adaptive"}], ids=["fixed", "adaptive"])
def test_an_interrupted_run_ends_like_the_uninterrupted_one(options, sampling, tmp_path):
    owners = ow.Owners(np.repeat(np.arange(20), 5), dict.fromkeys(range(20), 8.0), 1e-6)
    plan = ow.plan(owners, unit="owner", sampling=sampling, steps=6, batch_size=8, **options)
    inputs, results = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), []
    data = inputs, (inputs[:, 0] > 0).long()
    for parts in ((6,), (2, 6)):
        for number, stop in enumerate(parts):
            torch.manual_seed(1)
            model = nn.Linear(4, 2)
            stream = ow.SecretStream.from_seed(3)
            step = ow.PrivateStep(
                model, plan, torch.optim.SGD(model.parameters(), lr=0.5), functional.cross_entropy,
                weights=ow.INO(tail=0.5), stream=stream,
            )  # fmt: skip
            if number:
                step.restore(tmp_path / "run")
            start = step.steps_spent
            for batch in ow.PoissonBatches(
                data, plan, stream=stream, start=start, steps=stop - start
            ):
                step(batch)
            if stop < 6:
                step.save(tmp_path / "run")
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)
