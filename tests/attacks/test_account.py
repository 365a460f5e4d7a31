"""Attacks on the account of a run: no way to take a step that is not counted."""

import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.randomness import SecretStream
from ownerwise.runs import Run
from ownerwise.step import Account, account, account_file, checkpoints, read_account
from tools import step_tools
from tools import training_tools as tools
from tools.processes import fresh_processes

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

STEPS = 30


def plan():
    return tools.make_plan(steps=STEPS)


def own_step(seed=None):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = None if seed is None else SecretStream.from_seed(seed)
    return ow.PrivateStep(model, plan(), optimizer, functional.cross_entropy, stream=stream)


def batches(step, steps=None):
    left = step.plan.steps - step.steps_spent
    return ow.PoissonBatches(
        tools.data(), step.plan, start=step.steps_spent, steps=min(steps or left, left)
    )


def go_on(step, steps=None):
    for batch in batches(step, steps):
        step(batch)
    return step


@pytest.fixture
def folder(tmp_path):
    """A private run that was stopped after 8 of 12 steps."""

    class Stop(tools.NoLogger):
        def log(self, line):
            if line["step"] == 8:
                os.kill(os.getpid(), signal.SIGINT)

    trainer = tools.make_trainer(folder=tmp_path / "run", seed=None, loggers=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tools.data())
    return tmp_path / "run"


def resumed(folder):
    return tools.make_trainer(folder=folder, seed=None, loggers=[tools.NoLogger()]).fit(
        tools.data(), resume=True
    )


def assert_refused(folder, message):
    for attempt in (Run.load, resumed):
        with pytest.raises(ow.OwnerwiseError, match=message):
            attempt(folder)


# a file that is missing, old, or from elsewhere


def test_without_an_account_nothing_is_said_about_epsilon(folder):
    (folder / "account.db").unlink()
    assert_refused(folder, "account .* is missing")
    for path in folder.glob("checkpoint-*"):
        path.unlink()
    assert_refused(folder, "account .*is missing")


@pytest.mark.parametrize("evidence", ["checkpoint", "history"])
def test_an_old_copy_of_the_account_is_recognised(folder, evidence, tmp_path):
    shutil.copy(folder / "account.db", tmp_path / "old.db")
    old = {path.name: path.read_bytes() for path in folder.glob("checkpoint-*")}
    resumed(folder)
    shutil.copy(tmp_path / "old.db", folder / "account.db")
    if evidence == "history":  # the checkpoints of that time were put back too
        for path in folder.glob("checkpoint-*"):
            path.unlink()
        for name, content in old.items():
            (folder / name).write_bytes(content)
    assert_refused(folder, "an old copy")


@pytest.mark.parametrize("name", ["account.db", "config.json", "plan", "checkpoint"])
def test_a_file_of_another_run_is_recognised(folder, tmp_path, name):
    """Also of a run with the same plan and settings, and with a plan whose own hash is right."""
    other = tmp_path / "other"
    steps = 40 if name == "plan" else 12
    settings = {"name": "run", "plan": tools.make_plan(steps=steps), "loggers": [tools.NoLogger()]}
    with pytest.warns(ow.PrivacyWarning, match=r"already trained on owners .*\(once\)"):
        tools.make_trainer(folder=other, seed=None, **settings).fit(tools.data())
    for path in folder.glob(f"{name}*"):
        path.unlink()
    for path in other.glob(f"{name}*"):
        shutil.copy(path, folder)
    with pytest.raises(ow.OwnerwiseError, match=r"from another (run|folder)"):
        Run.load(folder)
    with pytest.raises(ow.OwnerwiseError, match=r"from another (run|folder)|plan: "):
        resumed(folder)


def test_lines_of_another_run_are_left_out(folder):
    path = folder / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    foreign = {**lines[-1], "step": 11, "run_id": "0" * 32}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, foreign]))
    with pytest.warns(match="1 of 4 lines belong to another run"):
        run = Run.load(folder)
    assert [line["step"] for line in run.history] == [0, 4, 8]
    assert run.steps_spent == 8


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET steps = 0",
        "DELETE FROM events WHERE number > 2",
        "INSERT INTO events SELECT number + 100, kind, run, plan, first, steps, private, previous,"
        " hash FROM events WHERE number = 0",
        "INSERT OR REPLACE INTO events SELECT * FROM events WHERE number = 2",
    ],
)
def test_events_are_only_appended(folder, statement):
    connection = sqlite3.connect(folder / "account.db")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET steps = steps - 1 WHERE kind = 'reserve'",
        "UPDATE events SET private = 1 - private",
        "UPDATE events SET kind = 'return' WHERE number = (SELECT max(number) FROM events)",
        "DELETE FROM events WHERE number = 2",
        "DELETE FROM events",
    ],
)
def test_a_changed_event_breaks_the_chain(folder, statement):
    connection = sqlite3.connect(folder / "account.db", isolation_level=None)
    triggers = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
    ).fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(statement)
    for _, sql in triggers:
        connection.execute(sql)
    connection.close()
    assert_refused(folder, "account .* is corrupted")


@pytest.mark.parametrize("where", ["config", "notes"])
def test_no_file_alone_makes_a_run_private(tmp_path, where):
    """With a fixed seed, or with features that were computed without noise."""
    settings = {"seed": 5} if where == "config" else {"seed": None}
    notes = {} if where == "config" else {"not_private": ["means of features"]}
    trainer = tools.make_trainer(folder=tmp_path, **settings, notes=notes)
    assert not trainer.fit(tools.data()).private
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "seed": None, "not_private": []}))
    if where == "config":
        with pytest.raises(ow.OwnerwiseError, match="one of them was changed"):
            Run.load(tmp_path)
        for checkpoint in tmp_path.glob("checkpoint-*"):
            checkpoint.unlink()
    run = Run.load(tmp_path)
    assert not run.private
    assert run.not_private == ["the run's account or checkpoint marks it as not private"]


# a folder that changes under a running run


@pytest.mark.parametrize("how", ["deleted", "moved", "old copy"])
@pytest.mark.parametrize("kind", ["trainer", "own loop"])
def test_a_folder_that_is_deleted_or_replaced_stops_the_run(tmp_path, how, kind):
    folder, counted = tmp_path / "run", []

    def attack():
        copy = tmp_path / "copy"
        if how == "old copy":
            shutil.copytree(folder, copy)
        if how == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        if how == "old copy":
            copy.rename(folder)

    class Attacker(tools.NoLogger):
        def log(self, line):
            counted.append(line["step"])
            if line["step"] == 4:
                attack()

    message = "deleted or replaced during the run|No such file"
    if kind == "trainer":
        trainer = tools.make_trainer(
            folder=folder, seed=None, evaluate_every=1, checkpoint_every=100, loggers=[Attacker()]
        )
        with pytest.raises((ow.OwnerwiseError, OSError), match=message):
            trainer.fit(tools.data())
        assert max(counted) <= 5
    else:
        step = own_step()
        step.save(folder)
        go_on(step, 4)
        attack()
        with pytest.raises(ow.OwnerwiseError, match=message):
            go_on(step)
        assert step.steps_spent == 4


# two processes, two steps, two threads


def own_loop(folder: Path, ready, results) -> None:
    """Take as many steps as the account allows; send the numbers of the steps that were taken."""
    torch.set_num_threads(1)
    step, taken = own_step(), []
    ready.wait()
    try:
        step.restore(folder)
        for batch in batches(step):
            step(batch)
            taken.append(batch.step)
    except ow.OwnerwiseError as error:
        assert "another process" in str(error)  # noqa: PT017
    results.put(taken)


def test_two_processes_never_take_one_step_twice(tmp_path):
    """Both hold the newest state; without a lock, 54 steps of a plan of 30 were taken."""
    go_on(own_step(), 2).save(tmp_path)
    context = fresh_processes(__name__)
    for _ in range(2):
        ready, results = context.Barrier(2), context.Queue()
        processes = [
            context.Process(target=own_loop, args=(tmp_path, ready, results)) for _ in range(2)
        ]
        for process in processes:
            process.start()
        taken = [step for _ in processes for step in results.get(timeout=120)]
        for process in processes:
            process.join(timeout=120)
        assert len(taken) == len(set(taken))
        assert max(taken, default=0) < read_account(tmp_path).spent <= STEPS


def test_two_steps_on_one_folder_cannot_both_go_on(tmp_path):
    first = go_on(own_step(), 2)
    first.save(tmp_path)
    second = own_step()
    second.restore(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match="only one may train a run"):
        go_on(first, 1)
    assert first.steps_spent == 2
    go_on(second)
    assert read_account(tmp_path).spent == STEPS


def test_a_second_folder_gives_no_second_count(tmp_path):
    step = go_on(own_step(), 2)
    step.save(tmp_path / "a")
    with pytest.raises(ow.OwnerwiseError, match="counted in a single folder"):
        step.save(tmp_path / "b")
    with pytest.raises(ow.OwnerwiseError, match="already contains a run"):
        own_step().save(tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = own_step()
    step.save("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    go_on(step, 3)
    assert read_account(tmp_path / "run").spent == 3


def in_threads(count, action):
    """Let threads start together; return what each returned, or the error it raised."""
    barrier, found = threading.Barrier(count), []

    def run():
        barrier.wait()
        try:
            found.append(action())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Slow(int):
    """A step whose comparison lets other threads run: what happens rarely happens always."""

    def __ge__(self, other):
        time.sleep(0.002)
        return int(self) >= other

    def __lt__(self, other):
        time.sleep(0.002)
        return int(self) < other


def test_two_threads_cannot_open_one_step():
    stream = SecretStream().child("noise")
    for step in range(10):
        found = in_threads(4, lambda step=step: stream.at_step(Slow(step)))
        assert sum(isinstance(result, RuntimeError) for result in found) == 3


def test_two_threads_cannot_have_one_child():
    class SlowName(str):
        __slots__ = ()

        def __hash__(self):
            time.sleep(0.002)
            return hash(str(self))

        def __eq__(self, other):
            return str(self) == str(other)

    for number in range(5):
        stream = SecretStream()
        found = in_threads(4, lambda s=stream, n=number: s.child(SlowName(f"purpose {n}")))
        assert sum(isinstance(result, RuntimeError) for result in found) == 3


def test_threads_that_share_a_step_take_each_batch_once(tmp_path):
    step = own_step()
    step.save(tmp_path)
    for batch in batches(step, 10):
        found = in_threads(3, lambda b=batch: step(b))
        assert sum(isinstance(result, ow.PlanError) for result in found) == 2
    assert step.steps_spent == step.updates == read_account(tmp_path).spent == 10


# forks


class Records(Dataset):
    def __len__(self):
        return len(tools.data()[0])

    def __getitem__(self, number):
        inputs, targets = tools.data()
        return inputs[number], targets[number]


def test_workers_do_not_hold_the_folder(tmp_path):
    """A worker outlives a killed run by seconds; the folder must be free at once."""
    from ownerwise.runs.folders import FolderLock

    lock = FolderLock(tmp_path)
    lock.__enter__()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        lock.__exit__()
        lock = FolderLock(tmp_path)
        with lock:
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_process_neither_frees_the_folder_nor_takes_steps(tmp_path):
    from ownerwise.runs.folders import FolderLock

    step = own_step()
    step.save(tmp_path)
    go_on(step, 2)
    (batch,) = batches(step, 1)
    with FolderLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            lock.__exit__()
            try:
                step(batch)
            except (ow.OwnerwiseError, RuntimeError):
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / ".holder").exists()
        with pytest.raises(ow.OwnerwiseError, match="in use"):
            FolderLock(tmp_path).__enter__()
    assert read_account(tmp_path).spent == 2
    step(batch)
    assert read_account(tmp_path).spent == 3


def test_a_run_with_workers_counts_every_step(tmp_path):
    run = tools.make_trainer(folder=tmp_path, seed=None).fit(Records(), num_workers=2)
    assert (run.steps_spent, read_account(tmp_path).spent) == (12, 12)


# blocks


def test_steps_are_on_disk_before_their_noise_is_drawn(tmp_path, monkeypatch):
    from ownerwise.randomness import Noise

    monkeypatch.setattr(account, "_BLOCKS", 3)
    counted, draw = [], Noise.gaussian

    def gaussian(self, step, *arguments, **options):
        counted.append((step, read_account(tmp_path).spent))
        return draw(self, step, *arguments, **options)

    monkeypatch.setattr(Noise, "gaussian", gaussian)
    step = own_step()
    step.save(tmp_path)
    go_on(step)
    assert [step for step, _ in counted] == list(range(STEPS))
    assert all(spent > step for step, spent in counted)
    assert len({spent for _, spent in counted}) < STEPS  # several steps in one commit


def test_what_was_reserved_is_given_back_but_never_what_was_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(account, "_BLOCKS", 2)
    monkeypatch.setattr(account, "_SECONDS", 100.0)
    step = own_step()
    step.save(tmp_path)
    go_on(step, 3)
    assert read_account(tmp_path).spent > 3
    step.save(tmp_path)
    assert read_account(tmp_path).spent == 3
    go_on(step, 2)
    killed = read_account(tmp_path).spent
    other = own_step()
    other.restore(tmp_path)
    assert other.steps_spent == killed > 5  # nobody knows what the first process went on to do
    held = other._account
    assert held is not None
    held.settle(0)
    assert read_account(tmp_path).spent == killed


@pytest.mark.parametrize("kind", ["interrupt", "failure"])
def test_a_trainer_gives_back_what_it_did_not_begin(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(account, "_BLOCKS", 2)
    monkeypatch.setattr(account, "_SECONDS", 100.0)

    class Stop(tools.NoLogger):
        def log(self, line):
            if line["step"] == 4 and kind == "interrupt":
                os.kill(os.getpid(), signal.SIGTERM)
            elif line["step"] == 4:
                raise OSError("no space left")

    trainer = tools.make_trainer(folder=tmp_path, seed=None, loggers=[Stop()])
    with pytest.raises((KeyboardInterrupt, OSError)):
        trainer.fit(tools.data())
    assert read_account(tmp_path).spent == 4
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-00000004.safetensors"


def test_an_account_with_many_events_is_read_in_time(tmp_path):
    """10,000 events: a night of slow steps."""
    book = Account.open(tmp_path, plan(), private=True)
    pairs = [("reserve", 0, 1, True), ("return", 0, 1, True)]
    book._append(pairs * 5000)
    since = time.perf_counter()
    assert read_account(tmp_path).spent == 0
    assert time.perf_counter() - since < 5


def test_the_account_is_complete_without_any_file_beside_it(tmp_path):
    """Whoever copies or keeps `account.db` alone, also after a kill, has every step."""
    step = own_step()
    step.save(tmp_path / "run")
    go_on(step, 5)  # the account is still open, as a killed process leaves it
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "run" / account.ACCOUNT, copy)
    assert read_account(copy).spent >= 5


def test_an_unfinished_log_on_a_read_only_medium_is_not_ignored(tmp_path, monkeypatch):
    """Earlier accounts kept the newest events in a log beside the file."""
    step = own_step()
    step.save(tmp_path)
    (tmp_path / f"{account.ACCOUNT}-wal").write_bytes(b"events")
    connect = account_file.connect

    def read_only(path, mode):
        if mode == "rw":
            raise sqlite3.OperationalError("unable to open database file")
        return connect(path, mode)

    monkeypatch.setattr(account_file, "connect", read_only)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(ow.OwnerwiseError, match="was not closed"):
        read_account(tmp_path)
    (tmp_path / f"{account.ACCOUNT}-wal").unlink()
    assert read_account(tmp_path).spent == 0


# what a run object says while, or after, its steps know better


class _Keep(tools.NoLogger):
    def start(self, run):
        self.run = run


class _FailsAfterItsUpdate(torch.optim.SGD):
    calls = 0

    def step(self, *arguments):
        result = super().step(*arguments)
        self.calls += 1
        if self.calls == 7:
            raise RuntimeError("after the update")
        return result


@pytest.mark.filterwarnings("ignore::ownerwise.PrivacyWarning")
def test_a_run_whose_step_failed_counts_that_step():
    kept = _Keep()
    trainer = tools.make_trainer(seed=None, loggers=[kept], optimizer=_FailsAfterItsUpdate)
    with pytest.raises(RuntimeError, match="after the update"):
        trainer.fit(tools.data())
    assert kept.run.steps_spent == 7


@pytest.mark.filterwarnings("ignore::ownerwise.PrivacyWarning")
def test_a_resumed_run_with_edited_settings_is_as_private_as_its_account(tmp_path):
    class Stop(tools.NoLogger):
        def log(self, line):
            if line["step"] == 8:
                raise RuntimeError("stop")

    folder, notes = tmp_path / "run", {"not_private": ["scaled by statistics"]}
    with pytest.raises(RuntimeError, match="stop"):
        tools.make_trainer(folder=folder, seed=None, loggers=[Stop()], notes=notes).fit(
            tools.data()
        )
    config = json.loads((folder / "config.json").read_text())
    del config["not_private"]
    (folder / "config.json").write_text(json.dumps(config))
    run = resumed(folder)
    assert not run.private
    run.card(tmp_path / "card.md")
    assert "not-private" in (tmp_path / "card.md").read_text()
