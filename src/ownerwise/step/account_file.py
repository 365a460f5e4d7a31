"""The file of a run's account: its events, what they add up to, and how the file is read.

The account is an SQLite file, `account.db`, with one table of events. Events are appended and never
changed, and each contains the hash of the previous one. See `account` for what the account
guarantees.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ownerwise.errors import OwnerwiseError
from ownerwise.files import DIGEST, WHOLE, fields, read_json

ACCOUNT = "account.db"
STEPS = "steps.json"  # the account in format 1
OWN_FOLDER_ADVICE = "give each run its own folder"

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
        head: number and hash of the last event, which checkpoints use to refer to the account; None
            in format 1.
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
class Event:
    """An entry of the account, which follows the one whose hash is `previous`."""

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
        """The entries that are stored and hashed."""
        return (
            self.number, self.kind, self.run, self.plan,
            self.first, self.steps, self.private, self.previous,
        )  # fmt: skip

    @cached_property
    def hash(self) -> str:
        """Hash of the values."""
        return hashlib.sha256(json.dumps(self.values).encode()).hexdigest()

    def applied_to(self, balance: Balance | None) -> Balance:
        """Return the balance after this event, or raise an error if the event is out of order."""
        number, previous = head_of(balance)
        follows = (self.number, self.previous) == (number + 1, previous)
        if self.kind == "open":
            fits = self.first == 0 and (balance is None or not balance.spent)
            after = Balance(self.run, self.plan, self.steps, 0, self.private)
        elif balance is None or balance.planned is None:
            raise ValueError(f"event {self.number} precedes the opening of the account")
        else:
            fits, after = self._continue(balance, balance.planned)
        if not (follows and fits):
            raise ValueError(f"event {self.number} does not follow the previous event")
        return replace(after, private=self.private, head=(self.number, self.hash))

    def _continue(self, balance: Balance, planned: int) -> tuple[bool, Balance]:
        """Return whether the event fits an open account, and the balance with its steps counted.

        Only steps of the last reserved block may be given back.
        """
        first, end, spent = self.first, self.first + self.steps, balance.spent
        returnable = first
        if self.kind == "reserve":
            fits = first == spent < end <= planned
            spent = end
        elif self.kind == "return":
            fits = balance.returnable <= first < end == spent
            spent = first
        elif self.kind == "resume":
            fits = first == spent == end
        elif self.kind == "not private":
            fits = first == spent == end and not self.private
            returnable = balance.returnable
        else:
            fits = False
        same_run = (self.run, self.plan) == (balance.run, balance.plan)
        regains_privacy = self.private and not balance.private
        after = replace(balance, spent=spent, returnable=returnable)
        return fits and same_run and not regains_privacy, after


def read_account(folder: str | os.PathLike) -> Balance | None:
    """Return the state of the account in a folder, or None if it has no events.

    Raises:
        OwnerwiseError: if the account is corrupted.
    """
    path = Path(folder) / ACCOUNT
    if path.exists():
        with explained(path):
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
        with closing(connect(path, "rw")) as connection:
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
    with closing(connect(path, "ro&immutable=1")) as connection:
        return _balance(connection)


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection to the file, in one of SQLite's modes."""
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=_WAIT,
        isolation_level=None,  # transactions begin and end explicitly
        check_same_thread=False,  # PrivateStep admits one thread at a time
    )


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all changes made within the context, or none of them."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def create(connection: sqlite3.Connection, folder: Path) -> Balance | None:
    """Return the balance of an unused account; create the account if the file is empty."""
    balance = _balance(connection)
    if balance is not None and balance.spent:
        raise OwnerwiseError(
            f"{folder} contains the account of another run with {balance.spent} spent steps: "
            f"{OWN_FOLDER_ADVICE}"
        )
    if balance is None:
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    return balance


def head_of(balance: Balance | None) -> tuple[int, str]:
    """Return the number and hash of the last event, or those that precede the first event."""
    if balance is None:
        return -1, _FIRST_PREVIOUS
    assert balance.head is not None
    return balance.head


def last_event(connection: sqlite3.Connection) -> tuple[int, str] | None:
    """Return the number and hash of the last event in the file."""
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
        event = Event(number, kind, run, plan, first, steps, bool(private), previous)
        if event.hash != digest:
            raise ValueError(f"event {event.number} does not match its hash")
        balance = event.applied_to(balance)
        hashes.append(digest)
    if balance is None:
        raise ValueError("there is no event")
    return replace(balance, hashes=tuple(hashes))


@contextmanager
def explained(path: Path) -> Iterator[None]:
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
        f"newest backup of the whole folder, or {OWN_FOLDER_ADVICE}"
    )
