"""Runs that are killed, resumed, or meant for a folder that is not theirs."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.runs import (
    Run,
)
from ownerwise.step import checkpoints, read_account
from tools import step_tools
from tools import training_tools as tools
from tools.processes import fresh_processes

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

SETTINGS = {
    "sgd": {"evaluate_every": 3, "checkpoint_every": 4, "weights": ow.INO(tail=0.4)},
    "momentum": {
        "optimizer_options": {"momentum": 0.9, "nesterov": True},
        "schedule": {"name": "cosine", "warmup": 4, "floor": 0.1},
        "evaluate_every": 5,
        "checkpoint_every": 2,
    },
    "adam": {
        "optimizer": torch.optim.Adam,
        "optimizer_options": {"betas": (0.8, 0.99), "amsgrad": True},
        "lr": 0.05,
        "schedule": "step",
        "evaluate_every": 2,
        "checkpoint_every": 5,
    },
    "averaged": {"averaging": 0.9, "evaluate_every": 3, "checkpoint_every": 4},
    "rarely stored": {"evaluate_every": 1, "checkpoint_every": 10},
}
STEPS = 30


def begin(folder: Path, kind: str, seed: int | None = tools.SEED, plan=None) -> Run:
    """Train, or go on, from a model whose first weights are those of the first attempt only."""
    first = 0 if checkpoints.latest(folder) is None else 1
    trainer = tools.make_trainer(
        folder=folder,
        name=kind,
        model=tools.make_model(seed=first),
        plan=plan or tools.make_plan(steps=STEPS),
        seed=seed,
        progress=False,
        **SETTINGS[kind],
    )
    test = tuple(tensor.clone() for tensor in tools.data())
    return trainer.fit(tools.data(), **tools.validation(), test=test, resume=True)


def child(folder: Path, kind: str, seed: int | None, plan, writes: int | None, seconds: float):
    """A process that kills itself: at a write to the disk, whole or half done; or by the clock."""
    torch.set_num_threads(1)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    sync, left = os.fsync, [writes]
    if writes is None:

        def slow(handle):
            sync(handle)
            time.sleep(0.05)  # on any machine, the run lasts longer than the clock

        os.fsync = slow
        threading.Timer(seconds, die).start()
    else:

        def counted(handle):
            left[0] -= 1
            if left[0] < 0:
                if Path(f"/proc/self/fd/{handle}").resolve().name == "history.jsonl":
                    os.truncate(handle, os.fstat(handle).st_size - 100)  # half of the last line
                die()
            sync(handle)

        os.fsync = counted
    begin(folder, kind, seed, plan)


def run_child(folder, kind, seed, *, writes=None, seconds=0.0) -> int:
    """Run `child` in a fresh process and return how it ended; imports are done once for all."""
    arguments = folder, kind, seed, tools.make_plan(steps=STEPS), writes, seconds
    context = fresh_processes(__name__)
    process = context.Process(target=child, args=arguments)
    process.start()
    process.join(timeout=120)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "averaged"])
def test_killed_at_random_moments_a_run_ends_like_the_uninterrupted_one(tmp_path, kind):
    """SIGKILL again and again: model, optimizer and history are equal bit for bit in the end."""
    chance = random.Random(kind)
    folder, killed = tmp_path / "killed", 0
    for attempt in range(3):
        when = {"seconds": chance.uniform(0.0, 0.4)} if attempt % 2 else {
            "writes": chance.randrange(2, 40)
        }  # fmt: skip
        killed += run_child(folder, kind, tools.SEED, **when) == -9
    assert killed >= 2
    run = begin(folder, kind)
    whole = begin(tmp_path / "whole", kind)
    assert tools.same(tools.stored(folder), tools.stored(tmp_path / "whole"))
    assert tools.timeless(run.history) == tools.timeless(whole.history)
    assert tools.lines(folder) == run.history
    seconds = [line["seconds"] for line in run.history]
    assert seconds == sorted(seconds)
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.json", "plan.json", "plan.safetensors", "environment.json",
        "history.jsonl", "account.db", *(path.name for path in checkpoints.stored(folder)),
    }  # fmt: skip
    assert len(checkpoints.stored(folder)) == 2
    assert read_account(folder).spent == STEPS


def test_a_private_run_that_was_killed_stays_within_its_budgets(tmp_path):
    """Pitfall 15: steps of lost updates stay spent; the history matches the restored model."""
    folder, spent = tmp_path / "run", 0
    for writes in (21, 20):
        assert run_child(folder, "rarely stored", None, writes=writes) == -9
        now = Run.load(folder)
        assert now.updates < now.steps_spent
        assert now.steps_spent >= spent
        assert all(line["step"] <= now.steps_spent for line in now.history)
        spent = now.steps_spent
    run = begin(folder, "rarely stored", None)
    assert run.private
    assert run.steps_spent == STEPS
    assert run.updates < STEPS
    assert (run.epsilon() <= run.plan.targets).all()
    updates = [line["updates"] for line in run.history]
    assert updates == sorted(updates)
    steps = [line["step"] for line in run.history]
    assert steps == sorted(set(steps))
    assert run.history[-1]["updates"] == run.updates
    assert tools.lines(folder) == run.history


def test_the_account_is_ahead_of_every_line(tmp_path):
    """A line tells of steps: they must be counted before anybody can read it."""
    seen = []

    class Reader:
        def start(self, run):
            pass

        def log(self, line):
            seen.append((line["step"], read_account(tmp_path / "run").spent))

        def finish(self, run):
            pass

    trainer = tools.make_trainer(
        folder=tmp_path / "run", loggers=[Reader()], evaluate_every=1, checkpoint_every=100
    )
    trainer.fit(tools.data())
    assert seen == [(step, step) for step in range(13)]


def test_half_a_line_is_dropped_and_written_again(tmp_path):
    whole = begin(tmp_path, "sgd")
    path = tmp_path / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert len(Run.load(tmp_path).history) == len(whole.history) - 1
    run = begin(tmp_path, "sgd")
    assert tools.timeless(run.history) == tools.timeless(whole.history)
    assert tools.lines(tmp_path) == run.history


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    whole = begin(tmp_path, "sgd")
    before = tools.stored(tmp_path)
    again = begin(tmp_path, "sgd")
    assert again.history == whole.history
    assert (again.steps_spent, again.updates) == (STEPS, STEPS)
    assert tools.same(tools.stored(tmp_path), before)


def test_a_folder_with_a_run_is_refused_unless_it_is_resumed(tmp_path):
    tools.make_trainer(folder=tmp_path).fit(tools.data())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ow.OwnerwiseError, match="already contains a run"):
        tools.make_trainer(folder=tmp_path).fit(tools.data())
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_other_settings_or_another_plan_are_listed_in_full(tmp_path):
    tools.make_trainer(folder=tmp_path).fit(tools.data(), **tools.validation())
    other = tools.make_trainer(
        folder=tmp_path,
        plan=tools.make_plan(steps=13, method="scale"),
        lr=0.25,
        optimizer_options={"momentum": 0.9},
        weights=ow.INO(),
        seed=6,
        evaluate_every=2,
    )
    with pytest.raises(ow.OwnerwiseError) as caught:
        other.fit(tools.data(), resume=True)
    message = str(caught.value)
    for part in (
        "optimizer.lr was 0.5 and is now 0.25", "optimizer.momentum was absent and is now 0.9",
        "weights was None and is now absent", "weights.tail was absent and is now 0.4",
        "seed was 5 and is now 6", "evaluate_every was 4 and is now 2",
        "groups_are was 'owners' and is now 'classes'",
        "plan: method was 'sample' and is now 'scale'", "plan: schedule was [[12, 1.0]]",
    ):  # fmt: skip
        assert part in message, part


def test_speed_settings_may_change(tmp_path):
    trainer = tools.make_trainer(
        folder=tmp_path / "a", performance=ow.Performance(micro_batch_size=100)
    )
    trainer.fit(tools.data())
    again = tools.make_trainer(
        folder=tmp_path / "a", performance=ow.Performance(micro_batch_size=5, lean=True)
    )
    again.fit(tools.data(), resume=True)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["micro_batch_size"] == 5


def test_another_environment_is_kept_beside_the_first(tmp_path):
    tools.make_trainer(folder=tmp_path).fit(tools.data())
    path = tmp_path / "environment.json"
    first = json.loads(path.read_text())
    path.write_text(json.dumps({**first, "torch": "1.0"}))
    run = tools.make_trainer(folder=tmp_path).fit(tools.data(), resume=True)
    assert run.environment == {**first, "earlier": [{**first, "torch": "1.0"}]}
    assert Run.load(tmp_path).environment == run.environment


def test_a_ledger_without_a_checkpoint_is_refused(tmp_path):
    tools.make_trainer(folder=tmp_path).fit(tools.data())
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(ow.OwnerwiseError, match="account with 12 spent steps but no checkpoint"):
        tools.make_trainer(folder=tmp_path).fit(tools.data(), resume=True)


def test_resume_needs_a_folder():
    with pytest.raises(ow.OwnerwiseError, match="needs the folder of the run"):
        tools.make_trainer().fit(tools.data(), resume=True)


class Failing(Dataset):
    """Fails once when so many records have been drawn (the first ones are a trial)."""

    def __init__(self, times):
        self.left = times

    def __len__(self):
        return len(tools.data()[0])

    def __getitem__(self, number):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("at a batch that holds a certain record")
        inputs, targets = tools.data()
        return inputs[number], targets[number]


def test_a_step_whose_batch_fails_is_spent(tmp_path):
    """Drawing it anew would choose batches by the records in them."""
    folder, records = tmp_path / "run", Failing(times=90)
    trainer = tools.make_trainer(folder=folder, seed=None)
    with pytest.raises(ow.OwnerwiseError, match=r"could not be loaded \(MemoryError\)"):
        trainer.fit(records)
    spent = read_account(folder).spent
    assert 0 < spent < trainer.plan.steps
    run = tools.make_trainer(folder=folder, seed=None).fit(records, resume=True)
    assert run.steps_spent == trainer.plan.steps
    assert run.updates < trainer.plan.steps
