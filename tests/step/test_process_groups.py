"""What goes wrong in one process stops all of them, and nothing is sent but what the step needs."""

import os
import signal
import time
import warnings
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ownerwise as ow
from ownerwise.step import read_account
from tools import groups, step_tools

BYTES = {torch.float32: 4, torch.float64: 8}


def make(plan, *, wrap=False, loss=functional.cross_entropy, stream=None, **options):
    model, *data = step_tools.example("mlp", step_tools.RECORDS)
    model = DistributedDataParallel(model) if wrap else model
    stream = step_tools.seeded() if stream is None else stream
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = ow.PrivateStep(model, plan, optimizer, loss, stream=stream, **options)
    return step, ow.PoissonBatches(tuple(data), plan, stream=stream), data


def said(work):
    with pytest.raises(ow.OwnerwiseError) as error:
        work()
    return str(error.value)


def sent(events):
    """The names of exchanges, each with its largest number of elements."""
    return [
        (event.name, max((size for shape in event.input_shapes for size in shape), default=0))
        for event in events
        if event.name.startswith("gloo:")
    ]


def wrapped(plan):
    """A step on a DistributedDataParallel: what it says, what it sends, what it refuses."""
    with pytest.warns(UserWarning, match="taken out of its DistributedDataParallel"):
        step, batches, _ = make(plan, wrap=True)
    batch = next(iter(batches))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step(batch)
    model = step.model
    hooked = DistributedDataParallel(model)
    hooked.register_comm_hook(None, lambda state, bucket: bucket)
    with warnings.catch_warnings(action="ignore"):  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    synced = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    problems = [
        said(partial(ow.PrivateStep, net, plan, optimizer, functional.cross_entropy))
        for net, optimizer in (
            (hooked, torch.optim.SGD(model.parameters(), lr=0.1)),
            (model, zero),
            (synced, torch.optim.SGD(synced.parameters(), lr=0.1)),
        )
    ]
    return sent(profiled.events()), step.model.training, problems


class Rows(torch.utils.data.Dataset):
    def __init__(self, data, broken):
        self.data, self.broken = data, broken

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, number):
        if self.broken:
            raise OSError("the disk is gone")
        return self.data[0][number], self.data[1][number]


def faults(plan, folder):
    """Errors in process 1 alone: what each process says, and how many steps were spent."""
    second = dist.get_rank() == 1
    found = {}

    def fails(outputs, targets):
        if second:
            raise RuntimeError("no loss here")
        return functional.cross_entropy(outputs, targets, reduction="none")

    step, batches, data = make(plan, loss=fails)
    with pytest.raises((RuntimeError, ow.OwnerwiseError)) as error:
        step(next(iter(batches)))
    found["loss"] = str(error.value), step.steps_spent
    step, _, _ = make(plan)
    broken = ow.PoissonBatches(Rows(data, broken=second), plan, stream=step_tools.seeded())
    found["loading"] = said(lambda: step(next(iter(broken)))), step.steps_spent
    step, _, _ = make(plan)
    other = ow.PoissonBatches(tuple(data), plan, stream=step_tools.seeded(), start=int(second))
    found["another step"] = said(lambda: step(next(iter(other)))), step.steps_spent
    step, batches, _ = make(plan)
    batch = next(iter(batches))
    with torch.no_grad():
        next(step.model.parameters()).add_(float(second))
        list(step.model.parameters())[-1].add_(float(second))
    found["parameters"] = said(lambda: step(batch)), step.steps_spent
    seeds = step_tools.seeded(dist.get_rank())
    found["seeds"] = said(lambda: make(plan, stream=seeds)), 0
    used = ow.SecretStream()
    used.child("elsewhere")
    found["used"] = said(lambda: make(plan, stream=used)), 0
    step, _, _ = make(plan)
    step, batches, _ = make(plan)
    step.open_account(folder)
    if not second:
        (folder / "account.db").unlink()
    batch = next(iter(batches))
    before = step_tools.weights_of(step.model)
    found["account"] = said(lambda: step(batch)), step.steps_spent
    assert torch.equal(step_tools.weights_of(step.model), before)
    step, _, _ = make(plan)
    inputs = data[0][:4], data[1][:4]
    found["by hand"] = said(lambda: step(step_tools.batch_of(*inputs))), step.steps_spent
    return found


def shares(plan, few):
    """Batches of a private run with fewer records than processes, and empty ones."""
    found = []
    stream = ow.SecretStream()
    step, batches, _ = make(few, stream=stream)
    for batch in batches:
        step(batch)
        found.append((batch.share.records, batch.indices))
    return found, step_tools.weights_of(step.model), stream.child("x").at_step(0).words(4)


def noise(plan):
    """The updates of a private run whose gradients are all zero, in units of the planned noise."""
    model = nn.Linear(100, 100, bias=False)
    data = torch.zeros(step_tools.RECORDS, 100), torch.zeros(step_tools.RECORDS, dtype=torch.int64)
    stream, optimizer = ow.SecretStream(), torch.optim.SGD(model.parameters(), lr=1.0)
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, stream=stream)
    found = []
    for batch in ow.PoissonBatches(data, plan, stream=stream):
        before = model.weight.detach().double()
        step(batch)
        moved = (model.weight.detach().double() - before) * plan.expected_batch_size
        found.append(moved.flatten() / plan.noise_std_at(batch.step))
    return torch.cat(found)


def everything(plan, few, folder):
    return wrapped(plan), faults(plan, folder), shares(plan, few), noise(plan)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = step_tools.make_plan()
    few = step_tools.make_plan(batch_size=1, steps=12)
    return groups.in_group(everything, 2, plan, few, tmp_path_factory.mktemp("run"))


def test_a_wrapper_stays_idle_and_what_reduces_otherwise_is_refused(found):
    """Pitfall 48: the sums are sent once, after clipping, and no gradient is."""
    numbers = sum(p.numel() for p in step_tools.mlp().parameters())
    for (exchanges, _, problems), *_ in found:
        sizes = [size for _, size in exchanges]
        assert sizes.count(numbers + 1) == 1
        assert all(size < 16 for size in sizes if size != numbers + 1)
        assert len(exchanges) == 2  # what the processes agree on before the step, and the sums
        assert "communication hook" in problems[0]
        assert "ZeroRedundancyOptimizer sends parameters" in problems[1]
        assert "SyncBatchNorm" in problems[2]


def test_an_error_in_one_process_stops_all_with_the_same_message(found):
    (_, first, *_), (_, second, *_) = found
    assert second["loss"] == ("no loss here", 1)
    assert first["loss"] == ("process 1 stopped with a RuntimeError, which it describes itself", 1)
    for name in ("loading", "another step", "parameters", "seeds", "used", "by hand", "account"):
        assert first[name] == second[name], name
    assert "account.db" in first["account"][0]
    assert "could not be loaded (OSError)" in first["loading"][0]
    assert first["loading"][1] == 1
    assert "the batch is for step 1, but the next step is 0" in first["another step"][0]
    assert "differ in the parameters of the model" in first["parameters"][0]
    assert "different seeds" in first["seeds"][0]
    assert "used before the processes agreed" in first["used"][0]
    assert "do not make batches by hand" in first["by hand"][0]
    for name in ("another step", "parameters", "by hand", "account"):
        assert first[name][1] == 0


def test_every_process_takes_every_step(found):
    """Pitfalls 5 and 47: shares may be empty, and so may batches."""
    (first, weights, words), (second, others, same_words) = (one[2] for one in found)
    assert torch.equal(weights, others)
    assert np.array_equal(words, same_words)  # the key of the first process
    assert len(first) == len(second) == 12
    for (records, one), (again, other) in zip(first, second, strict=True):
        assert records == again == len(one) + len(other)
        assert 0 <= len(one) - len(other) <= 1
    assert {records for records, _ in first} >= {0, 1}


def test_the_noise_of_all_processes_is_a_single_draw(found):
    """Pitfall 27: the variance of 60,000 draws is within 3 % (false alarms: 2e-7)."""
    one, other = (each[3] for each in found)
    assert torch.equal(one, other)
    assert len(one) == 60_000
    assert abs(float(one.var()) - 1) < 0.03


def killed(folder, plan):
    """Process 1 is killed in its third step; the others say what became of it, and when."""
    step, batches, _ = make(plan)
    step.save(folder)
    for batch in batches:
        if batch.step == 2:
            step.save(folder)
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        since = time.monotonic()
        try:
            step(batch)
        except Exception as error:
            return type(error).__name__, time.monotonic() - since
    return None


def test_a_killed_process_stops_all_and_the_run_goes_on_alone(tmp_path):
    plan = step_tools.make_plan()
    results = groups.in_group(killed, 3, tmp_path / "run", plan)
    assert results[1] is None
    for name, seconds in (results[0], results[2]):
        assert name
        assert seconds < groups.SECONDS / 2
    assert read_account(tmp_path / "run").spent in (2, 3)
    alone, _, data = make(plan)
    alone.restore(tmp_path / "run")
    assert alone.updates == 2
    batches = ow.PoissonBatches(tuple(data), plan, stream=step_tools.seeded(), start=2)
    for batch in batches:
        alone(batch)
    whole, batches, _ = make(plan)
    for batch in batches:
        whole(batch)
    torch.testing.assert_close(
        step_tools.weights_of(alone.model), step_tools.weights_of(whole.model), rtol=0, atol=1e-2
    )
    assert read_account(tmp_path / "run").spent == plan.steps


def test_nothing_is_exchanged_without_a_group(monkeypatch):
    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
        monkeypatch.setattr(dist, name, MethodType(pytest.fail, f"{name} was called"))
    step, batches, _ = make(step_tools.make_plan())
    step(next(iter(batches)))
    assert step.steps_spent == 1
