"""Budgets of owners under record sampling: declared numbers, and all drawn records removed."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch.nn import functional

import ownerwise as ow
from ownerwise.accounting import Exposure, RunCost, Schedule, reference
from ownerwise.batches import Batch
from tools.step_tools import flat

OWNERS, ROWS, LIMIT = 10, 20, 3
IDS = np.repeat(np.arange(OWNERS), ROWS)
RECORDS = dict.fromkeys(range(OWNERS), LIMIT)
BUDGETS = dict.fromkeys(range(OWNERS), 2.0)


def step_of(plan):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy)


@pytest.mark.parametrize("unit", ["record", "owner"])
@pytest.mark.parametrize("step_owners", ["bounded", "table", None])
def test_batches_refuse_owners_with_more_rows_than_declared(unit, step_owners):
    """The step knows only its own plan's rows, and the plans have the same hash (trap 60)."""
    owners = {
        "bounded": ow.Owners(IDS, BUDGETS).bound(LIMIT)[0],
        "table": ow.Owners(None, BUDGETS, records=RECORDS),
        None: None,
    }
    everything = ow.Owners(IDS, BUDGETS, records=RECORDS)
    plan = ow.plan(owners["bounded"], steps=4, batch_size=6, unit=unit, sampling="record")
    step = step_of(dataclasses.replace(plan, owners=owners[step_owners]))
    data = torch.randn(len(IDS), 4), torch.zeros(len(IDS), dtype=torch.int64)
    larger = dataclasses.replace(plan, owners=everything)
    assert larger.hash == step.plan.hash
    with pytest.raises(ow.OwnerwiseError, match=r"more records than declared.*not private"):
        ow.PoissonBatches(data, larger)


@pytest.mark.parametrize("records", [1, 30])
def test_a_plan_with_other_numbers_of_records_than_its_owners_is_refused(records, tmp_path):
    """The fingerprint of the owners stays, and the hash is made anew."""
    owners = ow.Owners(None, BUDGETS, records=RECORDS)
    plan = ow.plan(owners, "uniform", steps=4, batch_size=6, unit="owner", sampling="record")
    other = np.full(OWNERS, records)
    batch = float(plan.sampling_rates @ other)
    dataclasses.replace(
        plan, records=other, expected_batch_size=batch, noise_std=50.0, owners=None
    ).save(tmp_path / "plan.json")
    with pytest.raises(ow.PlanError, match="declared numbers of records differ"):
        ow.Plan.load(tmp_path / "plan.json", owners)


def test_one_record_each_with_many_deltas_is_the_plan_of_records():
    owners = ow.Owners(np.arange(8), np.geomspace(1, 4, 8), np.geomspace(1e-8, 1e-5, 8))
    of_records = ow.plan(owners, steps=4, batch_size=2)
    plan = ow.plan(owners, steps=4, batch_size=2, unit="owner", sampling="record")
    assert np.array_equal(plan.sampling_rates, of_records.sampling_rates)
    assert plan.noise_std == of_records.noise_std


def test_the_reference_handles_owners_who_declare_billions_of_records():
    run = RunCost(Schedule.constant(10))
    several, many = (
        reference.epsilon(run, Exposure(2.0 / count, 4.0), 1e-6, 2.0, count)
        for count in (10**6, 10**12)
    )
    assert many == pytest.approx(several, rel=1e-4)


@functools.cache
def plan_of(method: str) -> ow.Plan:
    budgets = dict(enumerate(np.geomspace(0.5, 8.0, OWNERS)))
    owners = ow.Owners(np.repeat(np.arange(OWNERS), 6), budgets, 1e-7)
    return ow.plan(owners, method, steps=4, batch_size=20, unit="owner", sampling="record")


def largest_movement(seed: int) -> float:
    """Return how far an owner's drawn records move a sum, in units of their number of clip norms.

    The order of the rows is kept. Some batches contain ties, or records that cancel.
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    plan = plan_of(("uniform", "sample", "scale", "both")[seed % 4])
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
    weights = None if seed % 3 == 0 else ow.INO(tail=random.uniform(0.05, 2))
    rule = (None, ow.AutoS(), ow.Psac())[random.integers(3)]
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
        weights=weights, clipping=rule,
        performance=ow.Performance(micro_batch_size=(None, 1, 4)[random.integers(3)]),
    )  # fmt: skip
    owner = np.sort(random.integers(0, OWNERS, random.integers(1, 30)))
    if random.random() < 0.3:
        owner[:] = owner[0]
    inputs = random.standard_normal((len(owner), 5)) * 10.0 ** random.uniform(-3, 3)
    if random.random() < 0.3:
        inputs[:] = inputs[0]
    if random.random() < 0.3:
        inputs[1::2] = -inputs[: 2 * (len(inputs) // 2) : 2]
    data = torch.tensor(inputs, dtype=torch.float32)
    targets = torch.tensor(random.integers(0, 3, len(owner)))

    def total(rows: np.ndarray) -> torch.Tensor:
        return flat(step.clipped_sum(Batch(0, rows, owner[rows], (data[rows], targets[rows]))))

    whole = total(np.arange(len(owner)))
    return max(
        float((whole - total(np.flatnonzero(owner != removed))).norm())
        / (int((owner == removed).sum()) * float(plan.clip_norms[removed]))
        for removed in np.unique(owner)
    )


def test_removing_all_drawn_records_of_an_owner():
    worst = [largest_movement(seed) for seed in range(48)]
    assert max(worst) <= 1
    assert max(worst) > 0.99
