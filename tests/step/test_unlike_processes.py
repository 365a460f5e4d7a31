"""Processes that do not hold the same data, exchange something themselves, or lose their group."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

import ownerwise as ow
from ownerwise.processes import Processes
from ownerwise.step.account import Account
from ownerwise.step.shared_account import SharedAccount
from tools import groups, step_tools


class Flipped(Dataset):
    """Records with random signs, as an augmentation draws them."""

    def __init__(self, data):
        self.data, self.random = data, np.random.default_rng()

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, number):
        return self.data[0][number] * float(self.random.choice([-1, 1])), self.data[1][number]


class Summing(nn.Module):
    """Adds to every output what another process makes of its own record in the same row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        outputs = self.linear(inputs)
        first = outputs.detach()[:1].clone()
        dist.all_reduce(first)
        return outputs + first


def summing(outputs, targets):
    total = outputs.detach().sum()
    dist.all_reduce(total)
    return functional.cross_entropy(outputs, targets, reduction="none") + 0 * total


def said(work):
    with pytest.raises(ow.OwnerwiseError) as error:
        work()
    return str(error.value)


def records():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(step_tools.RECORDS, 4, generator=generator)
    return inputs, torch.arange(step_tools.RECORDS) % 3


def taken(plan, data, steps=1, model=None, loss=functional.cross_entropy):
    model = nn.Linear(4, 3) if model is None else model
    step = step_tools.make_step(model, loss, plan=plan)
    for batch in ow.PoissonBatches(data, plan, stream=step_tools.seeded(), steps=steps):
        step(batch)
    return step.steps_spent


def unlike(plan, statistics, calibrated):
    rank = dist.get_rank()
    inputs, targets = records()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(rank))
    shuffled = inputs[order], targets[order]
    subset = Subset(TensorDataset(inputs, targets), order.tolist())
    few = tuple(array[: len(array) - rank] for array in (inputs, targets))
    owners = np.random.default_rng(rank).permutation(step_tools.owners().record_owner_index)
    other = ow.plan(
        ow.Owners(owners, {0: 1.0, 1: 2.0, 2: 4.0}), method="scale", steps=6, batch_size=12
    )
    standardised = nn.Sequential(ow.Standardise(2), nn.Linear(4, 3))
    found = {
        "data": said(lambda: taken(plan, shuffled)),
        "dataset": said(lambda: taken(plan, subset)),
        "owners": said(lambda: taken(other, (inputs, targets))),
        "rows": said(lambda: taken(plan, few)),
        "statistics": said(
            lambda: step_tools.make_step(
                standardised, functional.cross_entropy, plan=statistics
            ).standardise(shuffled)
        ),
        "calibration": said(
            lambda: step_tools.make_step(
                nn.Linear(4, 3), functional.cross_entropy, plan=calibrated
            ).calibrate(shuffled)
        ),
        "model": said(lambda: taken(plan, (inputs, targets), model=Summing())),
        "loss": said(lambda: taken(plan, (inputs, targets), loss=summing)),
    }
    assert taken(plan, Flipped((inputs, targets))) == 1
    with warnings.catch_warnings(action="ignore"):  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class Sharded(ZeroRedundancyOptimizer):
        pass

    model = nn.Linear(4, 3)
    sharded = Sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    found["sharded"] = said(lambda: ow.PrivateStep(model, plan, sharded, functional.cross_entropy))
    return found


def regrouped(plan, store):
    """The group ends in the middle of a run, and each process goes on in a group of its own."""
    rank = dist.get_rank()
    step = step_tools.make_step(nn.Linear(4, 3), functional.cross_entropy, plan=plan)
    batches = iter(ow.PoissonBatches(records(), plan, stream=step_tools.seeded()))
    batch = next(batches)
    dist.barrier()
    dist.destroy_process_group()
    without = said(lambda: step(batch))
    alone = step_tools.make_step(nn.Linear(4, 3), functional.cross_entropy, plan=plan)
    whole = next(iter(ow.PoissonBatches(records(), plan, stream=step_tools.seeded())))
    dist.init_process_group("gloo", init_method=f"file://{store}{rank}", rank=0, world_size=1)
    alone(whole)  # a group of one process is this process alone
    return without, said(lambda: step(batch)), step.steps_spent


def everything(plan, statistics, calibrated, store):
    return unlike(plan, statistics, calibrated), regrouped(plan, store)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = step_tools.make_plan()
    statistics = step_tools.make_plan(statistics=ow.ColumnStatistics())
    calibrated = step_tools.make_plan(calibration=ow.Calibration())
    store = tmp_path_factory.mktemp("store") / "store"
    return groups.in_group(everything, 2, plan, statistics, calibrated, store)


def test_processes_with_other_data_are_refused(found):
    """A record that has another number in another process could be in a batch twice."""
    first, second = (one[0] for one in found)
    assert first == second  # one message, in all of them
    for name in ("data", "dataset", "statistics", "calibration"):
        assert "processes differ in the data" in first[name], name
    assert "processes differ in the owners of the records" in first["owners"]
    assert "has 59 rows" in first["rows"]


def test_what_exchanges_data_itself_is_refused(found):
    """What others add to a record's output or loss would not be bounded by its clip norm."""
    first = found[0][0]
    for name in ("model", "loss"):
        assert "exchanges data between processes" in first[name], name
    assert "Sharded sends parameters or gradients" in first["sharded"]


def test_a_run_ends_with_its_group(found):
    """Processes that go on alone would each add the same noise to another part of the batch."""
    for without, regrouped, spent in (one[1] for one in found):
        assert "the process group of this run" in without
        assert "the process group of this run" in regrouped
        assert spent == 0


def test_a_step_that_others_may_have_taken_is_not_given_back(tmp_path):
    """The first process is interrupted after the step was written, in the exchange that says so."""
    plan = step_tools.make_plan()
    account = SharedAccount(Processes(), lambda: Account.open(tmp_path, plan, private=True))

    def interrupted(work):
        work()
        raise KeyboardInterrupt

    account._processes = SimpleNamespace(together=interrupted)
    with pytest.raises(KeyboardInterrupt):
        account.take(0, True)
    account.settle(0)
    assert account.balance.spent == 1
