"""The account of a run: an append-only file that records which steps of the plan were spent.

Guarantee. The account never counts fewer steps than were taken: a step is committed to disk before
any of its noise is drawn. Commits are slow (milliseconds), so steps are reserved in blocks of at
most 0.4 seconds of work and at most a twentieth of the plan. A run that stops cleanly gives back
the steps that it reserved but did not begin; if the run is killed, they remain spent.

The account is an SQLite file, `account.db`, with one table of events. Events are appended and never
changed, and each contains the hash of the previous one. A process can append only if the last event
is the one it last saw (compare-and-set), so two processes cannot both take the same step: the
second one gets an error. If the account's file was deleted or replaced, the next commit is
rejected.

The account cannot detect that a copy of the whole folder was restored later or used elsewhere, or
that someone changed events and recomputed the hashes. Keep run folders where nobody else can write
to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from ownerwise.errors import OwnerwiseError
from ownerwise.files import DIGEST, WHOLE, fields, read_json, writing
from ownerwise.planning import Plan

ACCOUNT = "account.db"
STEPS = "steps.json"  # the account in format 1
OWN_FOLDER = "give each run its own folder"

_SECONDS = 0.4  # work in one reserved block
_BLOCKS = 20  # smallest number of blocks in a plan
_WAIT = 30.0  # seconds to wait for another process that is writing
_APPLICATION = 0x4F574E52  # "OWNR" in the file's header
_VERSION = 1
_FIRST_PREVIOUS = "0" * 64

_SCHEMA = (
    """CREATE TABLE events (
    number INTEGER PRIMARY KEY CHECK (number >= 0),
    kind TEXT NOT NULL CHECK (kind IN ('open', 'resume', 'reserve', 'return', 'not private')),
    run TEXT NOT NULL CHECK (length(run) = 32),
    plan TEXT NOT NULL CHECK (length(plan) = 64),
    first INTEGER NOT NULL CHECK (first >= 0),
    steps INTEGER NOT NULL CHECK (steps >= 0),
    private INTEGER NOT NULL CHECK (private IN (0, 1)),
    previous TEXT NOT NULL CHECK (length(previous) = 64),
    hash TEXT NOT NULL UNIQUE CHECK (length(hash) = 64)
)""",
    f"""CREATE TRIGGER events_follow BEFORE INSERT ON events
WHEN NEW.number != (SELECT count(*) FROM events) OR NEW.previous != coalesce(
    (SELECT hash FROM events ORDER BY number DESC LIMIT 1), '{_FIRST_PREVIOUS}')
BEGIN SELECT RAISE(ABORT, 'an event must follow the last one'); END""",
    """CREATE TRIGGER events_stay BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'events are never changed'); END""",
    """CREATE TRIGGER events_remain BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END""",
)

_STEPS_FILE = fields({"format": WHOLE, "plan": DIGEST, "steps_spent": WHOLE})


@dataclass(frozen=True)
class Balance:
    """The state of an account.

    Attributes:
        run: identity of the run; "" in format 1.
        plan: hash of the run's plan.
        planned: number of steps in the plan; None in format 1.
        spent: number of spent steps.
        private: whether the guarantee holds, judging by the steps taken; None in format 1.
        head: number and hash of the last event, by which checkpoints refer to the account; None in
            format 1.
        returnable: first step that may still be given back.
        hashes: hash of every event; empty unless the account was read from its file.
    """

    run: str
    plan: str
    planned: int | None
    spent: int
    private: bool | None
    head: tuple[int, str] | None = None
    returnable: int = 0
    hashes: tuple[str, ...] = field(default=(), repr=False)

    def holds(self, head: Sequence) -> bool:
        """Return whether the account contains an event with this number and hash."""
        number, digest = head
        return number < len(self.hashes) and self.hashes[number] == digest


@dataclass(frozen=True)
class _Event:
    number: int
    kind: str
    run: str
    plan: str
    first: int
    steps: int
    private: bool
    previous: str

    @property
    def values(self) -> tuple:
        return (
            self.number, self.kind, self.run, self.plan,
            self.first, self.steps, self.private, self.previous,
        )  # fmt: skip

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.values).encode()).hexdigest()

    def follow(self, balance: Balance | None) -> Balance:
        """Return the balance after this event, or raise an error if the event is out of order."""
        number, previous = (-1, _FIRST_PREVIOUS) if balance is None else _head_of(balance)
        fits = (self.number, self.previous) == (number + 1, previous)
        if self.kind == "open":
            fits = fits and self.first == 0 and (balance is None or not balance.spent)
            spent, returnable = 0, 0
            balance = Balance(self.run, self.plan, self.steps, 0, self.private)
        elif balance is None or balance.planned is None:
            raise ValueError(f"event {self.number} precedes the opening of the account")
        else:
            end = self.first + self.steps
            spent = {"reserve": end, "return": self.first}.get(self.kind, balance.spent)
            returnable = balance.returnable if self.kind == "not private" else self.first
            fits = fits and (self.run, self.plan) == (balance.run, balance.plan)
            fits = fits and self.private <= bool(balance.private)
            fits = fits and {
                "reserve": self.first == balance.spent < end <= balance.planned,
                "return": balance.returnable <= self.first < end == balance.spent,
                "resume": self.first == balance.spent == end,
                "not private": self.first == balance.spent == end and not self.private,
            }.get(self.kind, False)
        if not fits:
            raise ValueError(f"event {self.number} does not follow the previous event")
        head = self.number, self.hash
        return replace(balance, spent=spent, private=self.private, head=head, returnable=returnable)


class Account:
    """The account of an active run, as used by the process that takes the steps."""

    def __init__(self, folder: Path, plan: Plan):
        self._path = folder.resolve() / ACCOUNT
        self._plan = plan
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._balance: Balance | None = None
        self._place = (0, 0)
        self._block: int | None = None  # first step of the last block reserved here
        self._since = 0.0
        self._usable = True  # False after a failed commit, until one succeeds

    @classmethod
    def open(cls, folder: Path, plan: Plan, *, private: bool, spent: int = 0) -> Self:
        """Open the account of a new run that has already taken `spent` steps in memory."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        account = cls(folder, plan)
        account._connect(create=True)
        entries = [("open", 0, plan.steps, private)]
        entries += [("reserve", 0, spent, private)] if spent else []
        account._append(entries, run=secrets.token_hex(16))
        return account

    @classmethod
    def resume(cls, folder: Path, plan: Plan, balance: Balance, *, private: bool) -> Self:
        """Take over an account whose state is `balance`, and upgrade it if it has format 1."""
        if balance.head is None:
            account = cls.open(folder, plan, private=private, spent=balance.spent)
            with writing(folder):
                (folder / STEPS).unlink()
            return account
        account = cls(folder, plan)
        account._connect()
        account._balance = balance
        account._append([("resume", balance.spent, 0, private and bool(balance.private))])
        return account

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._path.parent

    @property
    def balance(self) -> Balance:
        """The state of the account."""
        assert self._balance is not None
        return self._balance

    def take(self, step: int, private: bool) -> None:
        """Count a step. When this returns, the step is recorded on disk and its noise may be drawn.

        With a fixed seed, a resumed run repeats steps that are already counted.
        """
        balance, entries = self.balance, []
        private = private and bool(balance.private)
        if private != balance.private:
            entries.append(("not private", balance.spent, 0, private))
        if step >= balance.spent:
            entries.append(("reserve", balance.spent, self._block_size(step), private))
        if entries or not self._usable:
            self._append(entries)
        if step >= balance.spent:
            self._block, self._since = balance.spent, time.perf_counter()

    def settle(self, steps: int) -> None:
        """Count exactly the first `steps` steps, and give back any that were reserved beyond them.

        Only steps that this process reserved in its last block and did not begin are given back.
        """
        if not self._usable:  # reserved steps stay spent
            return
        balance = self.balance
        private = bool(balance.private)
        if steps > balance.spent:
            self._append([("reserve", balance.spent, steps - balance.spent, private)])
        elif self._block is not None and (first := max(steps, balance.returnable)) < balance.spent:
            self._append([("return", first, balance.spent - first, private)])
        self._block = None

    def close(self) -> None:
        """Close the file; the next step opens it again."""
        if self._connection is not None and os.getpid() == self._process:
            self._finalizer()
            self._connection = None

    def _block_size(self, step: int) -> int:
        """Return how many steps to reserve now, based on the time that the last block took."""
        assert self.balance.planned is not None
        size = 1
        if self._block is not None:
            seconds = (time.perf_counter() - self._since) / max(1, step - self._block)
            size = int(_SECONDS / max(seconds, 1e-9))
        left = self.balance.planned - self.balance.spent
        return max(1, min(size, self.balance.planned // _BLOCKS, left))

    def _append(self, entries: Sequence[tuple[str, int, int, bool]], run: str = "") -> None:
        """Append events in a transaction; raise an error if another writer has appended events."""
        if os.getpid() != self._process:
            raise OwnerwiseError(
                f"the account of {self.folder} belongs to process {self._process}, from which this "
                "one was forked: take steps in one process only"
            )
        self._usable = False
        connection = self._connect()
        self._check_place()
        balance = self._balance
        with _explained(self._path), _transaction(connection):
            if run:
                balance = _created(connection, self.folder)
            elif _head(connection) != self.balance.head:
                raise OwnerwiseError(
                    f"another process or PrivateStep has taken steps from the account of "
                    f"{self.folder}: only one may train a run; restore the run to continue it"
                )
            for kind, first, steps, private in entries:
                number, previous = (-1, _FIRST_PREVIOUS) if balance is None else _head_of(balance)
                name, plan = run or self.balance.run, self._plan.hash
                event = _Event(number + 1, kind, name, plan, first, steps, private, previous)
                balance = event.follow(balance)
                connection.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*event.values, event.hash),
                )
        self._balance = balance
        self._check_place()
        self._usable = True

    def _connect(self, create: bool = False) -> sqlite3.Connection:
        if self._connection is None:
            with _explained(self._path):
                connection = _connection(self._path, "rwc" if create else "rw")
                self._connection = connection
                self._finalizer = weakref.finalize(self, _close, connection, self._process)
                # not WAL: a copy of the file without its log would lack the newest events
                connection.execute("PRAGMA journal_mode = DELETE")
                connection.execute("PRAGMA synchronous = EXTRA")
            place = os.stat(self._path)
            if self._balance is None:
                self._place = place.st_dev, place.st_ino
        return self._connection

    def _check_place(self) -> None:
        try:
            place = os.stat(self._path)
        except OSError:
            place = None
        if place is None or (place.st_dev, place.st_ino) != self._place:
            raise OwnerwiseError(
                f"{self._path} was deleted or replaced during the run: its steps can no longer be "
                "counted, so the run stops"
            )


def read_account(folder: str | os.PathLike) -> Balance | None:
    """Return the state of the account in a folder, or None if it has no events.

    Raises:
        OwnerwiseError: if the account is corrupted.
    """
    path = Path(folder) / ACCOUNT
    if path.exists():
        with _explained(path):
            return _read(path)
    old = Path(folder) / STEPS
    if not old.exists():
        return None
    content = read_json(old, _STEPS_FILE)
    if content["format"] != 1:
        raise OwnerwiseError(f"{old} is corrupted: expected format 1, got {content['format']}")
    return Balance("", content["plan"], None, content["steps_spent"], None)


def _read(path: Path) -> Balance | None:
    try:
        with closing(_connection(path, "rw")) as connection:
            return _balance(connection)
    except sqlite3.OperationalError:
        if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
            raise
    if any(_is_filled(Path(f"{path.resolve()}{suffix}")) for suffix in ("-wal", "-journal")):
        raise OwnerwiseError(
            f"the account {path} was not closed properly, so it cannot be read completely without "
            "write access: copy the whole folder to a writable location"
        )
    # on a read-only medium, nobody can be writing
    with closing(_connection(path, "ro&immutable=1")) as connection:
        return _balance(connection)


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _connection(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=_WAIT,
        isolation_level=None,  # transactions begin and end explicitly
        check_same_thread=False,  # PrivateStep admits one thread at a time
    )


def _close(connection: sqlite3.Connection, process: int) -> None:
    if os.getpid() == process:  # SQLite must not be touched in a forked process
        connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _created(connection: sqlite3.Connection, folder: Path) -> Balance | None:
    """Return the balance of an unused account; create the account if the file is empty."""
    balance = _balance(connection)
    if balance is not None and balance.spent:
        raise OwnerwiseError(
            f"{folder} contains the account of another run with {balance.spent} spent steps: "
            f"{OWN_FOLDER}"
        )
    if balance is None:
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    return balance


def _head_of(balance: Balance) -> tuple[int, str]:
    assert balance.head is not None
    return balance.head


def _head(connection: sqlite3.Connection) -> tuple[int, str] | None:
    return connection.execute(
        "SELECT number, hash FROM events ORDER BY number DESC LIMIT 1"
    ).fetchone()


def _balance(connection: sqlite3.Connection) -> Balance | None:
    """Check every event and return the resulting balance, or None if the file is empty."""
    schema = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if not schema:
        return None
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != _VERSION:
        raise OwnerwiseError(
            f"{ACCOUNT} has format {version}, but this version of ownerwise reads format "
            f"{_VERSION}: use the version that wrote it"
        )
    if tuple(sql for (sql,) in schema) != _SCHEMA:
        raise ValueError("the schema differs")
    balance, hashes = None, []
    rows = connection.execute("SELECT * FROM events ORDER BY number")
    for number, kind, run, plan, first, steps, private, previous, digest in rows:
        event = _Event(number, kind, run, plan, first, steps, bool(private), previous)
        if event.hash != digest:
            raise ValueError(f"event {event.number} does not match its hash")
        balance = event.follow(balance)
        hashes.append(digest)
    if balance is None:
        raise ValueError("there is no event")
    return replace(balance, hashes=tuple(hashes))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error caused by SQLite or by a corrupted event into a clear error message."""
    try:
        yield
    except OwnerwiseError:
        raise
    except sqlite3.OperationalError as error:
        raise OwnerwiseError(f"the account {path} cannot be used: {error}") from None
    except (sqlite3.Error, ValueError, TypeError, OverflowError):
        raise OwnerwiseError(_damaged(path)) from None


def _damaged(path: Path) -> str:
    return (
        f"the account {path} is corrupted, so the number of spent steps is unknown. Restore the "
        f"newest backup of the whole folder, or {OWN_FOLDER}"
    )
