"""A record's place must not change what is computed for the others, in hardened plans.

The attack: features so large that a target can sit on the last bit of the prediction. Removing one
record moves all others up a row, their predictions round differently, and hundreds of gradients
change their sign at once: the sum moves by hundreds of clip norms.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import INO
from ownerwise.step.secret_rows import place
from tools import step_tools as tools

RECORDS = 401
OWNERS = ow.Owners(np.zeros(4 * RECORDS, dtype=int), {0: 4.0}, 1e-5)


def plan_of(hardened: bool) -> ow.Plan:
    return ow.plan(OWNERS, "uniform", steps=4, batch_size=RECORDS, hardened=hardened)


@pytest.fixture(params=[1, 2])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def squared(outputs, targets):
    return (outputs[:, 0] - targets) ** 2


def batch_on_the_last_bit(model, size):
    """Targets that are the model's own predictions for 401 rows, which 400 rows may round away."""
    generator = torch.Generator().manual_seed(0)
    inputs = size * torch.randn(RECORDS, 7, generator=generator)
    with torch.no_grad():
        targets = model(inputs)[:, 0].clone()
        without = model(inputs[1:])[:, 0]
    moved = without != targets[1:]
    targets[1:] = torch.where(moved, without, targets[1:] + size)
    return inputs, targets


def summed(step, inputs, targets, chosen, stream=None):
    index = np.asarray(chosen)
    batch = ow.Batch(
        0, index, np.zeros(len(index), dtype=np.int64), (inputs[index], targets[index])
    )
    randomness = dataclasses.replace(ow.mechanisms.Randomness(), rows=stream)
    return tools.flat(step.clipped_sum(batch, randomness))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("micro", [None, 64])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("clipping", [ow.Standard(), ow.AutoS(), ow.Psac()], ids=repr)
def test_removing_a_record_moves_the_sum_by_its_clip_norm_alone(size, micro, clipping):
    torch.manual_seed(1)
    model = nn.Linear(7, 1)
    plan = plan_of(hardened=True)
    inputs, targets = batch_on_the_last_bit(model, size)
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), squared,
        clipping=clipping, performance=ow.Performance(micro_batch_size=micro),
    )  # fmt: skip
    whole = summed(step, inputs, targets, range(RECORDS), tools.CoupledRows(plan.hardened_rows))
    for removed in (0, 1, 200, 400):
        rest = np.delete(np.arange(RECORDS), removed)
        part = summed(step, inputs, targets, rest, tools.CoupledRows(plan.hardened_rows, removed))
        assert float((whole - part).norm()) <= float(plan.clip_norms[0])


NETWORKS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 3)), (7,)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3)
        ),
        (3, 6, 6),
    ),
    "text": (tools.TextModel, (9,)),
    "transformer": (tools.TransformerModel, (4, 8)),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("micro", [None, 37])
def test_losses_norms_and_factors_of_the_others_keep_every_bit(name, dtype, micro):
    make, shape = NETWORKS[name]
    torch.manual_seed(2)
    model = make().to(dtype)
    plan = plan_of(hardened=True)
    tokens = name == "text"
    inputs = (
        torch.randint(0, 20, (90, *shape)) if tokens else 50 * torch.randn(90, *shape).to(dtype)
    )
    targets = torch.randint(0, 3, (90,))
    step = ow.PrivateStep(
        model, plan, torch.optim.SGD(model.parameters(), lr=0.1), functional.cross_entropy,
        weights=INO(tail=0.0), performance=ow.Performance(micro_batch_size=micro), not_private=True,
    )  # fmt: skip
    summed(step, inputs, targets, range(90), tools.CoupledRows(plan.hardened_rows))
    whole = step.peek
    for removed in (0, 44, 89):
        rest = np.delete(np.arange(90), removed)
        summed(step, inputs, targets, rest, tools.CoupledRows(plan.hardened_rows, removed))
        for column in ("losses", "norms", "factors"):
            before = np.delete(getattr(whole, column), removed)
            assert np.array_equal(before, getattr(step.peek, column))


def test_rows_are_distinct_secret_and_empty_ones_hold_zeros():
    batch = ow.Batch(
        0, np.arange(5), np.zeros(5, dtype=np.int64), (torch.ones(5, 2), torch.ones(5))
    )
    places = [
        place(batch, 40, ow.SecretStream.from_seed(seed).at_step(0)).where for seed in range(30)
    ]
    assert all(len(set(where)) == 5 for where in places)
    assert len({tuple(where) for where in places}) == 30
    assert set(np.concatenate(places)) >= set(range(5, 30))
    rows = place(batch, 40, None)
    assert float(rows.inputs.sum()) == 10
    assert rows.occupied.sum() == 5
    np.testing.assert_array_equal(rows.of_records(rows.spread(np.arange(5.0), empty=-1)), range(5))


def test_a_batch_that_overflows_its_rows_is_noise_only_and_the_reserve_pays_for_it():
    plan = plan_of(hardened=True)
    ordinary = plan_of(hardened=False)
    assert plan.hardened_rows is not None
    assert plan.hardened_rows < 1.6 * RECORDS
    assert plan.overflow_probability * plan.steps <= 0.01 * 1e-5
    np.testing.assert_allclose(plan.accounted_deltas, 0.99e-5)
    assert 1 < plan.noise_std / ordinary.noise_std < 1.01
    model = nn.Linear(7, 1)
    step = ow.PrivateStep(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), squared)
    inputs, targets = torch.randn(4 * RECORDS, 7), torch.randn(4 * RECORDS)
    assert float(summed(step, inputs, targets, range(plan.hardened_rows)).norm()) > 0
    assert float(summed(step, inputs, targets, range(plan.hardened_rows + 1)).norm()) == 0


def test_hardened_plans_are_stored_and_too_few_rows_are_refused(tmp_path):
    plan = plan_of(hardened=True)
    assert plan.hardened_rows is not None
    plan.save(tmp_path / "plan.json")
    assert ow.Plan.load(tmp_path / "plan.json", OWNERS) == plan
    with pytest.raises(ow.PlanError, match=r"needs \d+ rows; this one has"):
        dataclasses.replace(plan, hardened_rows=plan.hardened_rows - 20).verify()


def test_the_hard_order_needs_a_hardened_plan():
    model = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hard = {"loss": functional.cross_entropy, "weights": INO(width=0.0)}
    with pytest.raises(ow.OwnerwiseError, match="hardened=True"):
        ow.PrivateStep(model, plan_of(hardened=False), optimizer, **hard)
    ow.PrivateStep(model, plan_of(hardened=True), optimizer, **hard)


@pytest.mark.parametrize("count", [200, 4000])
def test_a_small_clip_norm_beside_large_ones_keeps_its_bound(count):
    """Contributions of similar length are summed apart; float32 sums moved by 1.02 clip norms."""
    owners = ow.Owners(np.repeat([0, 1], [50, count]), {0: 0.05, 1: 40.0}, 1e-5)
    options = {"method": "scale", "steps": 2, "batch_size": 0.9 * (count + 50)}
    plan = ow.plan(owners, hardened=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(50, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if count == 4000:
        ordinary = ow.plan(owners, **options)
        paid = ow.PrivateStep(model, ordinary, optimizer, functional.cross_entropy).slack
        assert paid > 0.05  # without hardening, the slack must cover the large sums
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy)
    inputs, targets = 100 + torch.randn(count + 50, 50), torch.zeros(count + 50, dtype=torch.long)
    owner_index = owners.record_owner_index.astype(np.int64)

    def total(chosen, removed=None):
        data = (inputs[chosen], targets[chosen])
        rows = tools.CoupledRows(plan.hardened_rows, removed)
        randomness = dataclasses.replace(ow.mechanisms.Randomness(), rows=rows)
        batch = ow.Batch(0, chosen, owner_index[chosen], data)
        return tools.flat(step.clipped_sum(batch, randomness))

    everyone = np.arange(count + 50)
    whole = total(everyone)
    assert plan.clip_norms.max() / plan.clip_norms.min() > 50
    assert step.slack < 2e-3
    for removed in (0, 20, 49):
        moved = float((whole - total(np.delete(everyone, removed), removed)).norm())
        assert moved <= plan.clip_norms[0]


def test_more_records_than_declared_are_refused():
    """Declared 400 of 1,000: batches would overflow the rows, and the owner would spend more."""
    owners = ow.Owners(np.zeros(1000, dtype=int), {0: 2.0}, 1e-5, records={0: 400})
    model = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for hardened, weights in ((True, None), (False, INO()), (False, None)):
        plan = ow.plan(owners, "uniform", steps=4, batch_size=100, hardened=hardened)
        with pytest.raises(ow.OwnerwiseError, match="more records than declared"):
            ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, weights=weights)


def test_a_plan_with_too_few_rows_is_refused_by_the_step():
    plan = dataclasses.replace(plan_of(hardened=True), hardened_rows=1)
    model = nn.Linear(7, 1)
    with pytest.raises(ow.OwnerwiseError, match=r"needs \d+ rows; this one has 1"):
        ow.PrivateStep(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), squared)


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("records", [500, 1500])
def test_identical_records_under_ino_stay_within_the_slack(records, hardened):
    """Removing one changes all weights by an ulp, and with them every rounding of the sum."""
    owners = ow.Owners(np.zeros(2 * records, dtype=int), {0: 4.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=2, batch_size=records, hardened=hardened)
    torch.manual_seed(0)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, weights=INO())
        inputs = torch.rand(1, 6, generator=generator).expand(records, 6).clone()
        targets = torch.zeros(records, dtype=torch.long)
        rows = (None, None)
        if hardened:
            rows = tools.CoupledRows(plan.hardened_rows), tools.CoupledRows(plan.hardened_rows, 0)
        whole = summed(step, inputs, targets, range(records), rows[0])
        part = summed(step, inputs, targets, range(1, records), rows[1])
        assert float((whole - part).norm()) <= float(plan.clip_norms[0])
