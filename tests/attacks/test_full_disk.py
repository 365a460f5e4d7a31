"""A disk that is full or fails at any write: a clear error, no leftovers, no uncounted step.

`Disk` counts every write of this process: each new folder, temporary file, content, sync, rename,
deletion, and each statement of the account that writes. It lets the n-th one fail, or all from the
n-th one on. Content is then written by half. The account is also met with SQLite's own limit, and
all files are written to a file system that really is full, if this process may mount one.
"""

import errno
import gc
import os
import shutil
import sqlite3
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.planning import storage
from ownerwise.randomness import Noise
from ownerwise.runs import Run
from ownerwise.step import account, checkpoint_file, read_account
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

STEPS = 6
KINDS = ("trainer", "own loop")
FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
SAID = [os.strerror(number) for number in (*FAILURES, errno.EFBIG)]
SAID += ["database or disk is full", "disk I/O error"]

# every run after the first one trains on the same owners
pytestmark = pytest.mark.filterwarnings("ignore:this process has already:ownerwise.PrivacyWarning")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Steps are reserved in pairs."""
    monkeypatch.setattr(account, "_BLOCKS", 3)
    monkeypatch.setattr(account, "_SECONDS", 100.0)


@pytest.fixture
def draws(monkeypatch):
    """The steps whose noise was drawn."""
    drawn, draw = [], Noise.gaussian

    def gaussian(self, step, *arguments, **options):
        drawn.append(step)
        return draw(self, step, *arguments, **options)

    monkeypatch.setattr(Noise, "gaussian", gaussian)
    return drawn


def take_all_steps(kind: str, folder: Path) -> None:
    """Start or resume a run and take its steps to the end."""
    plan = tools.make_plan(steps=STEPS)
    if kind == "trainer":
        trainer = tools.make_trainer(
            folder=folder, plan=plan, seed=None, evaluate_every=2, checkpoint_every=3,
            progress=False, name="run",
        )  # fmt: skip
        trainer.fit(tools.data(), resume=True)
        return
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy)
    if checkpoint_file.latest(folder) is None:
        step.save(folder)
    else:
        step.restore(folder)
    for batch in ow.PoissonBatches(tools.data(), plan, start=step.steps_spent):
        step(batch)
        if step.steps_spent % 3 == 0:
            step.save(folder)


class Disk:
    """Counts the writes of this process; the write number `at` fails, and `stays` all after it."""

    def __init__(self, at: int = -1, number: int = 0, stays: bool = False):
        self.at, self.number, self.stays = at, number, stays
        self.seen = 0
        self.undeleted = []
        self.patch = pytest.MonkeyPatch()

    def __enter__(self):
        patch = self.patch
        for name in ("fsync", "replace", "chmod", "mkdir", "unlink"):
            patch.setattr(os, name, self.failing(getattr(os, name)))
        patch.setattr(os, "open", self.creating(os.open))
        patch.setattr(Path, "open", self.opening(Path.open))
        for module in (checkpoint_file, storage):
            patch.setattr(module, "save_file", self.saving(module.save_file))
        connect = partial(sqlite3.connect, factory=self.database())
        patch.setattr(account.sqlite3, "connect", connect)
        return self

    def __exit__(self, *error):
        self.patch.undo()

    def fails(self) -> bool:
        self.seen += 1
        return self.seen == self.at or (self.stays and 0 < self.at < self.seen)

    @property
    def error(self) -> OSError:
        return OSError(self.number, os.strerror(self.number))

    def failing(self, function):
        def called(*arguments, **options):
            deletes = function.__name__ == "unlink"
            if deletes:  # possible on a full disk
                may_fail = self.number == errno.EIO and not self.stays
            else:  # mkdir ignores all errors if the folder exists
                may_fail = function.__name__ != "mkdir" or not Path(arguments[0]).exists()
            if may_fail and self.fails():
                self.undeleted += [Path(arguments[0]).name] if deletes else []
                raise self.error
            return function(*arguments, **options)

        return called

    def creating(self, function):
        def opened(path, flags, *arguments, **options):
            if flags & os.O_CREAT and self.fails():
                raise self.error
            return function(path, flags, *arguments, **options)

        return opened

    def opening(self, function):
        def opened(path, mode="r", *arguments, **options):
            file = function(path, mode, *arguments, **options)
            if mode[0] in "wa":
                write = file.write

                def half(content):
                    if self.fails():
                        write(content[: len(content) // 2])
                        raise self.error
                    return write(content)

                file = Proxy(file, half)
            return file

        return opened

    def saving(self, function):
        def save(tensors, file, *arguments, **options):
            if self.fails():
                Path(file).write_bytes(b"half")
                words = f"{os.strerror(self.number)} (os error {self.number})"
                raise SafetensorError(f"Error while serializing: I/O error: {words}")
            return function(tensors, file, *arguments, **options)

        return save

    def database(self):
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, statement, *arguments):
                writes = statement.split()[0] in ("CREATE", "INSERT", "COMMIT")
                if writes and disk.fails():
                    raise disk.database_error
                result = super().execute(statement, *arguments)
                if statement == "COMMIT" and disk.fails():  # on disk, but the sync failed
                    raise disk.database_error
                return result

        return Connection

    @property
    def database_error(self) -> sqlite3.OperationalError:
        full = self.number != errno.EIO
        return sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")


class Proxy:
    """A file with another method for writing."""

    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def taken(draws: list[int]) -> int:
    return len(set(draws))


def spent(folder: Path) -> int:
    balance = read_account(folder)
    return 0 if balance is None else balance.spent


def check_folder(folder: Path, draws: list[int], undeleted: list[str]) -> None:
    """A run that has failed counts all its steps and has left nothing half-written."""
    assert taken(draws) <= spent(folder) <= STEPS
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    left = {name for name in names if name.startswith(".") or "-journal" in name}
    assert left <= {".lock", *undeleted}
    history = folder / "history.jsonl"
    assert not history.exists() or history.read_bytes()[-1:] in (b"", b"\n")
    try:
        run = Run.load(folder)
    except ow.OwnerwiseError:
        assert not {"config.json", "plan.json", "environment.json"} <= set(names)
    else:
        assert not run.problems
        assert run.steps_spent == spent(folder) >= run.updates


def fail_and_finish(kind: str, folder: Path, draws: list[int], disk) -> str:
    """Let a run fail on this disk; then let it end. Return the message."""
    draws.clear()
    with disk, pytest.raises(ow.OwnerwiseError) as failed:
        take_all_steps(kind, folder)
    assert str(folder) in str(failed.value)
    assert any(words in str(failed.value) for words in SAID)
    check_folder(folder, draws, getattr(disk, "undeleted", []))
    take_all_steps(kind, folder)
    assert taken(draws) <= spent(folder) == STEPS
    return str(failed.value)


def writes(kind: str, folder: Path, **options) -> int:
    """Return how many writes a run makes."""
    with Disk(**options) as disk:
        take_all_steps(kind, folder)
    return disk.seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_at_some_writes(tmp_path, draws, kind):
    for at in range(1, writes(kind, tmp_path / "whole") + 1, 5):
        disk = Disk(at=at, number=FAILURES[at % 3], stays=at % 2 == 0)
        fail_and_finish(kind, tmp_path / str(at), draws, disk)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", FAILURES, ids=errno.errorcode.get)
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_failure_at_every_write(tmp_path, draws, kind, number, stays):
    for at in range(1, writes(kind, tmp_path / "whole", number=number, stays=stays) + 1):
        disk = Disk(at=at, number=number, stays=stays)
        fail_and_finish(kind, tmp_path / str(at), draws, disk)


@contextmanager
def small_pages(most: int = 2**30):
    """Let accounts have pages of 512 bytes, the smallest size, and at most this many of them."""
    whole = sqlite3.connect

    def connect(*arguments, **options):
        connection = whole(*arguments, **options)
        connection.execute("PRAGMA page_size = 512")
        connection.execute(f"PRAGMA max_page_count = {most}")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account.sqlite3, "connect", connect)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_an_account_that_cannot_grow(tmp_path, draws, kind):
    """SQLite's own error, with its own rollback, at each size that the file would have."""
    with small_pages():
        take_all_steps(kind, tmp_path / "whole")
    pages = (tmp_path / "whole" / account.ACCOUNT).stat().st_size // 512
    for most in range(1, pages):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(account, "_BLOCKS", STEPS)  # a commit for every step
            fail_and_finish(kind, tmp_path / str(most), draws, small_pages(most))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 pages."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs permission to mount a file system")
    yield place
    gc.collect()  # closes the accounts of failed runs
    subprocess.run(["umount", str(place)], check=True)


@contextmanager
def full(place: Path, free: int):
    """Fill a file system, except for some pages."""
    state = os.statvfs(place)
    (place / "ballast").write_bytes(bytes(state.f_frsize * (state.f_bavail - free)))
    yield
    (place / "ballast").unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_really_full(small_disk, draws, kind):
    take_all_steps(kind, small_disk / "whole")
    used = 64 - os.statvfs(small_disk).f_bavail
    shutil.rmtree(small_disk / "whole")
    for free in range(used):
        fail_and_finish(kind, small_disk / "run", draws, full(small_disk, free))
        shutil.rmtree(small_disk / "run")
