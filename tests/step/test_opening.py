"""The release of column statistics: sensitivity, noise, account, and resuming."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import standardising_layers
from ownerwise.owners import split_ids
from ownerwise.randomness import SecretStream
from ownerwise.step import read_account
from ownerwise.step.opening import opening_grid, opening_problems, opening_sum
from ownerwise.training.recording import Recorder


def setting(record_owner=None, records=60, seed=0, epsilon=4.0, **options):
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1.5, 1.5, (records, 3)).astype(np.float32)
    missing = (rng.random((records, 3)) < 0.3).astype(np.float32)
    values[:4] = [[np.nan, 1, -1], [np.inf, -np.inf, 0], [3e38, -3e38, 1e-40], [1, 1, 1]]
    missing[:4] = 0
    missing[3, 0] = np.nan
    x = torch.tensor(np.concatenate([values, missing, values[:, :1]], axis=1))
    y = torch.tensor(rng.integers(0, 2, records))
    ids = np.arange(records) % 7 if record_owner is None else record_owner
    owners = ow.Owners(ids, dict.fromkeys(np.unique(np.asarray(ids)).tolist(), epsilon))
    options = {"steps": 3, "batch_size": 2, "statistics": ow.ColumnStatistics(), **options}
    return ow.plan(owners, **options), x, y, model()


def model():
    torch.manual_seed(1)
    return nn.Sequential(ow.Standardise(3), nn.Linear(7, 2))


def clean(x):
    return x.nan_to_num(0, 1, -1).clamp(-1, 1)


def step_of(plan, network, **options):
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    return ow.PrivateStep(network, plan, sgd, functional.cross_entropy, **options)


def without(plan, x, y, out):
    """The sum over the records that are left, under a plan with the same numbers."""
    index = plan.owners.record_owner_index
    left = ~np.isin(np.arange(len(index)), out)
    fewer = ow.Owners(
        plan.owners.ids[index[left]],
        dict(zip(plan.owners.ids.tolist(), plan.targets.tolist(), strict=True)),
        records=dict(zip(plan.owners.ids.tolist(), plan.records.tolist(), strict=True)),
    )
    kept = dataclasses.replace(plan, owners=fewer)
    layer = model()[0]
    return opening_sum(kept, layer, (x[torch.from_numpy(left)], y[torch.from_numpy(left)]))


def test_every_record_removed_in_turn_changes_the_sum_by_at_most_1():
    """Also records with NaN, infinite and huge values; the sums are exact, so no tolerance."""
    plan, x, y, network = setting()
    whole = opening_sum(plan, network[0], (x, y))
    assert torch.isfinite(whole).all()
    changes = []
    for out in range(60):
        change = whole - without(plan, x, y, [out])
        changes.append(float(change.norm()))
        alone = network[0].contributions(x[out : out + 1])[0]
        np.testing.assert_allclose(change, alone, atol=2 * opening_grid(plan, network[0]))
    assert max(changes) <= 1
    assert max(changes) > 0.9


@pytest.mark.parametrize("sampling", ["owner", "record"])
def test_every_owner_removed_in_turn_changes_the_sum_by_at_most_1(sampling):
    """With the owner as the unit; owners have 1 to 30 records, and extreme values."""
    counts = [1, 2, 5, 30, 22]
    ids = np.repeat(np.arange(5), counts)
    plan, x, y, network = setting(ids, unit="owner", sampling=sampling)
    x[:30] = torch.tensor([1.0, 1, 1, 0, 0, 0, 0])  # equal records add up
    whole = opening_sum(plan, network[0], (x, y))
    changes = [
        float((whole - without(plan, x, y, np.flatnonzero(ids == owner))).norm())
        for owner in range(5)
    ]
    assert max(changes) <= 1
    assert changes[0] > 0.999


def test_more_records_than_declared_still_add_at_most_1_together():
    ids = np.repeat(np.arange(5), 12)
    rng_plan, x, y, network = setting(ids, unit="owner")
    owners = ow.Owners(ids, dict.fromkeys(range(5), 4.0), records=dict.fromkeys(range(5), 2))
    plan = ow.plan(owners, unit="owner", steps=3, batch_size=2, statistics=ow.ColumnStatistics())
    x[:] = torch.tensor([1.0, 1, 1, 0, 0, 0, 0])
    assert float(opening_sum(plan, network[0], (x, y)).norm()) <= 5
    assert rng_plan.opening_std == plan.opening_std


def test_records_with_several_owners():
    """Removing an owner removes the shared records, which leaves all other rows as they are."""
    cells = np.array(["a", "a;b", "b", "c", "b;c", "a", "c", "b", "a;b;c", "c"])
    ids = split_ids(cells, ";")
    owners = ow.Owners(ids, dict.fromkeys("abc", 4.0))
    plan = ow.plan(
        owners, unit="owner", sampling="record", steps=3, batch_size=2,
        statistics=ow.ColumnStatistics(),
    )  # fmt: skip
    layer = ow.Standardise(3)
    x = torch.ones(10, 7)
    x[:, 3:] = 0
    for owner in "abc":
        of_owner = torch.tensor([owner in cell.split(";") for cell in cells.tolist()])
        missing = x.clone()
        missing[of_owner, 3:6] = 1  # a record whose values are missing adds nothing
        change = opening_sum(plan, layer, (x, None)) - opening_sum(plan, layer, (missing, None))
        assert 0.2 < float(change.norm()) <= 1


def test_the_order_of_the_records_changes_no_bit():
    plan, x, y, network = setting(np.arange(60), records=60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    first = opening_sum(plan, network[0], (x, y))
    assert torch.equal(opening_sum(plan, network[0], (x[order], y)), first)


def test_the_noise_has_the_planned_size():
    """200 runs with 9 numbers each; a false alarm is less likely than 1e-6."""
    plan, x, y, network = setting()
    exact = opening_sum(plan, network[0], (x, y))
    drawn = []
    for seed in range(200):
        fresh = model()
        step = step_of(plan, fresh, stream=SecretStream.from_seed(seed))
        step.standardise((x, y))
        drawn.append((torch.tensor(step.statistics.state()["sums"]).flatten() - exact).numpy())
    drawn = np.concatenate(drawn) / plan.opening_std
    assert abs(drawn.mean()) < 5 / np.sqrt(len(drawn))
    assert abs(drawn.std() - 1) < 5 / np.sqrt(2 * len(drawn))


def test_it_is_made_once_and_before_the_first_step(tmp_path):
    plan, x, y, network = setting()
    x = clean(x)
    step = step_of(plan, network)
    batches = ow.PoissonBatches((x, y), step.plan)
    with pytest.raises(ow.OwnerwiseError, match="have not been released"):
        step(next(iter(batches)))
    with pytest.raises(ow.OwnerwiseError, match="have not been released"):
        step.save(tmp_path / "run")
    step.standardise((x, y))
    mean = network[0].mean.clone()
    with pytest.raises(ow.PlanError, match="already been released"):
        step.standardise((x, y))
    assert torch.equal(network[0].mean, mean)
    assert step.private
    for batch in batches:
        step(batch)
    assert torch.equal(network[0].mean, mean)


def test_it_is_charged_before_it_leaves(tmp_path, monkeypatch):
    """A run that dies between the release and its first checkpoint cannot be repeated."""
    plan, x, y, network = setting()
    x = clean(x)
    step = step_of(plan, network)
    step.open_account(tmp_path)
    seen = []
    made = type(step._randomness).opening
    monkeypatch.setattr(
        type(step._randomness),
        "opening",
        lambda self, *given: (seen.append(read_account(tmp_path).spent), made(self, *given))[1],
    )
    step.standardise((x, y))
    assert seen == [1]
    step.settle(0)
    assert read_account(tmp_path).spent == 1
    with pytest.raises(ow.OwnerwiseError, match="already contains a run"):
        step_of(plan, model()).open_account(tmp_path)


def test_a_run_that_failed_after_the_release_is_refused(tmp_path, monkeypatch):
    plan, x, y, network = setting()
    data = clean(x), y
    options = {"lr": 0.1, "folder": tmp_path / "run", "progress": False}

    def failing(self):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "record", failing)
        with pytest.raises(MemoryError):
            ow.Trainer(network, plan, **options).fit(data)
    with pytest.raises(ow.OwnerwiseError, match="spent steps but no checkpoint"):
        ow.Trainer(model(), plan, **options).fit(data, resume=True)


def test_a_resumed_run_keeps_its_statistics(tmp_path):
    plan, x, y, network = setting()
    x = clean(x)
    step = step_of(plan, network)
    step.standardise((x, y))
    step.save(tmp_path)
    fresh = model()
    again = step_of(plan, fresh)
    again.restore(tmp_path)
    assert not again.to_standardise
    assert torch.equal(fresh[0].mean, network[0].mean)
    assert torch.equal(fresh[0].scale, network[0].scale)
    assert again.statistics.record() == step.statistics.record()
    with pytest.raises(ow.PlanError, match="already been released"):
        again.standardise((x, y))


def test_a_run_tells_what_it_released(tmp_path):
    plan, x, y, network = setting()
    x = clean(x)
    trainer = ow.Trainer(network, plan, lr=0.1, folder=tmp_path / "run", progress=False)
    run = trainer.fit((x, y))
    assert run.private
    again = ow.Run.load(tmp_path / "run", model=model())
    assert again.history[0]["statistics"]["std"] == plan.opening_std
    assert "statistics" not in again.history[-1]
    assert (again.predict(x) == run.predict(x)).all()
    run.card(tmp_path / "CARD.md")
    card = (tmp_path / "CARD.md").read_text()
    assert "before training, one sum over all records" in card
    assert "3 columns, noise std" in card
    assert "GaussianDpEvent" in card.split("# the release before training")[0].splitlines()[-1]
    run.report(tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert "Column statistics released before training" in report
    assert "A column that its noise would hide keeps its declared range" in report


def test_models_and_data_that_do_not_fit():
    plan, x, y, network = setting()
    plain = nn.Sequential(nn.Linear(7, 2))
    assert "0 layers Standardise; expected one" in opening_problems(plan, plain)[0]
    two = nn.Sequential(ow.Standardise(3), ow.Standardise(3))
    assert "2 layers Standardise" in opening_problems(plan, two)[0]
    owners = plan.owners
    free = ow.plan(owners, steps=3, batch_size=2)
    assert "the plan accounts for no statistics" in opening_problems(free, network)[0]
    with pytest.raises(ow.PlanError, match="does not account for column statistics"):
        step_of(free, plain).standardise((x, y))
    standardising_layers(network)[0].released.fill_(True)
    assert opening_problems(free, network) == []
    assert "from another run" in opening_problems(plan, network)[0]
    step = step_of(plan, model())
    for data in ((x[:, :5], y), (x[:, :, None], y)):
        with pytest.raises(ow.OwnerwiseError, match="column statistics need"):
            step.standardise(data)
    with pytest.raises(ow.OwnerwiseError):
        step.standardise((x[:50], y[:50]))
    assert step.to_standardise
