"""SIGKILL at every write: the account never counts fewer steps than were taken.

A child process counts its write points: before and after each rename, sync and deletion of a file,
each statement and closing of the account, and each draw of noise. It kills itself at the n-th one.
It journals every draw of noise beforehand, in a file that nothing else touches.
"""

import os
import signal
import sqlite3
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.randomness import Noise
from ownerwise.runs import Run
from ownerwise.step import account, checkpoints, read_account
from tools import step_tools
from tools import training_tools as tools
from tools.processes import fresh_processes

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

STEPS = 12
KINDS = ("trainer", "own loop")

# every run after the first one trains on the same owners
pytestmark = pytest.mark.filterwarnings("ignore:this process has already:ownerwise.PrivacyWarning")


def make_plan():
    return tools.make_plan(steps=STEPS)


def take_all_steps(kind: str, folder: Path, plan: ow.Plan, seed: int | None) -> None:
    """Start or resume a run and take its steps to the end."""
    if kind == "trainer":
        trainer = tools.make_trainer(
            folder=folder, plan=plan, seed=seed, evaluate_every=5, checkpoint_every=3,
            progress=False, name="run",
        )  # fmt: skip
        trainer.fit(tools.data(), resume=True)
        return
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = None if seed is None else ow.SecretStream.from_seed(seed)
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, stream=stream)
    if checkpoints.latest(folder) is None:
        step.save(folder)
    else:
        step.restore(folder)
    for batch in ow.PoissonBatches(tools.data(), plan, stream=stream, start=step.steps_spent):
        step(batch)
        if step.steps_spent % 3 == 0:
            step.save(folder)


class Points:
    """Counts the write points of this process, and kills it at one of them."""

    def __init__(self, at: int | None):
        self.left = -1 if at is None else at
        self.seen = 0

    def reach(self) -> None:
        self.seen += 1
        if self.seen == self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function):
        def counted(*arguments, **options):
            self.reach()
            result = function(*arguments, **options)
            self.reach()
            return result

        return counted


def journalled(draw, journal: Path):
    handle = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def gaussian(self, step, *arguments, **options):
        os.write(handle, f"{step}\n".encode())
        return draw(self, step, *arguments, **options)

    return gaussian


def child(kind, folder, journal, plan, seed, at, seen):
    """Train until the n-th write point."""
    torch.set_num_threads(1)
    points = Points(at)
    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, points.around(getattr(os, name)))

    class Counting(sqlite3.Connection):
        execute = points.around(sqlite3.Connection.execute)
        close = points.around(sqlite3.Connection.close)

    account.sqlite3.connect = partial(sqlite3.connect, factory=Counting)
    account._BLOCKS = 3  # blocks of up to four steps
    account._SECONDS = 100.0
    Noise.gaussian = points.around(journalled(Noise.gaussian, journal))
    take_all_steps(kind, folder, plan, seed)
    seen.put(points.seen)


def run_child(kind, folder, journal, seed, at=None) -> int | None:
    """Return the number of write points, or None if the child was killed."""
    context = fresh_processes(__name__)
    seen = context.Queue()
    process = context.Process(
        target=child, args=(kind, folder, journal, make_plan(), seed, at, seen)
    )
    process.start()
    process.join(timeout=120)
    assert process.exitcode in (0, -9)
    return seen.get(timeout=10) if process.exitcode == 0 else None


def taken(journal: Path) -> int:
    return len(journal.read_text().splitlines()) if journal.exists() else 0


def spent(folder: Path) -> int:
    balance = read_account(folder)
    return 0 if balance is None else balance.spent


def kill_and_finish(tmp_path: Path, kind: str, ats: list[int], monkeypatch) -> int:
    """Kill a private run at these points, one after the other; then let it end. Return its loss."""
    name = "-".join(map(str, ats))
    folder, journal = tmp_path / name / "run", tmp_path / f"{name}.journal"
    folder.mkdir(parents=True)
    for at in ats:
        killed = run_child(kind, folder, journal, None, at) is None
        assert taken(journal) <= spent(folder) <= STEPS
        if kind == "trainer" and checkpoints.latest(folder):
            run = Run.load(folder)
            assert run.steps_spent == spent(folder) >= run.updates
            assert run.private
        if not killed:
            break
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "gaussian", journalled(Noise.gaussian, journal))
        take_all_steps(kind, folder, make_plan(), None)
    assert taken(journal) <= spent(folder) == STEPS
    return STEPS - taken(journal)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_some_write_points_a_run_counts_all_its_steps(tmp_path, kind, monkeypatch):
    whole = run_child(kind, tmp_path / "whole", tmp_path / "journal", None)
    assert whole is not None
    assert taken(tmp_path / "journal") == spent(tmp_path / "whole") == STEPS
    chosen = Random(kind).sample(range(1, whole + 1), 6)
    losses = [kill_and_finish(tmp_path, kind, [at], monkeypatch) for at in chosen]
    assert max(losses) <= 4, "a kill loses at most one block"
    kill_and_finish(tmp_path, kind, [whole // 2, whole // 4], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_write_point_a_run_counts_all_its_steps(tmp_path, kind, monkeypatch):
    """At each write point from the first to the last; then pairs of kills at random points."""
    whole = run_child(kind, tmp_path / "whole", tmp_path / "journal", None)
    assert whole is not None
    losses = [kill_and_finish(tmp_path, kind, [at], monkeypatch) for at in range(1, whole + 1)]
    chance = Random(kind)
    pairs = [[chance.randrange(1, whole) for _ in range(2)] for _ in range(13)]
    losses += [kill_and_finish(tmp_path, kind, pair, monkeypatch) for pair in pairs]
    print(f"{kind}: {whole} kills and {len(pairs)} pairs, steps lost: {losses}")
    assert max(losses) <= 8


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_fixed_seed_a_killed_run_repeats_its_lost_steps(tmp_path, kind):
    run_child(kind, tmp_path / "whole", tmp_path / "journal", 3)
    folder = tmp_path / "run"
    killed = [run_child(kind, folder, tmp_path / "other", 3, at) for at in (90, 70)]
    assert killed == [None, None]
    run_child(kind, folder, tmp_path / "other", 3)
    assert tools.same(tools.stored(folder), tools.stored(tmp_path / "whole"))
    assert spent(folder) == STEPS
