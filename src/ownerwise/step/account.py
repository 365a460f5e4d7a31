"""The account of a run: an append-only file that records which steps of the plan were spent.

Guarantee. The account never counts fewer steps than were taken: a step is committed to disk before
any of its noise is drawn. Commits are slow (milliseconds), so steps are reserved in blocks of at
most 0.4 seconds of work and at most a twentieth of the plan. A run that stops cleanly gives back
the steps that it reserved but did not begin; if the run is killed, they remain spent.

A process can append an event (`account_file`) only if the last event is the one it last saw
(compare-and-set), so two processes cannot both take the same step: the second one gets an error. If
the account's file was deleted or replaced, the next commit is rejected.

The account cannot detect that a copy of the whole folder was restored later or used elsewhere, or
that someone changed events and recomputed the hashes. Keep run folders where nobody else can write
to them.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from ownerwise.errors import OwnerwiseError
from ownerwise.files import writing
from ownerwise.planning import Plan
from ownerwise.step.account_file import (
    ACCOUNT,
    STEPS,
    Balance,
    Event,
    connect,
    create,
    explained,
    head_of,
    last_event,
    transaction,
)

_SECONDS = 0.4  # work in one reserved block
_BLOCKS = 20  # smallest number of blocks in a plan


class Planned(Protocol):
    """What an account needs to know about a plan: its hash, and how much of it can be spent."""

    @property
    def hash(self) -> str:
        """Hash of everything that the plan specifies."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    @property
    def closing_count(self) -> int:
        """Number of sums that are released after the steps."""
        ...


class Account:
    """The account of an active run, as used by the process that takes the steps."""

    def __init__(self, folder: Path, plan: Plan | Planned):
        self._path = folder.resolve() / ACCOUNT
        self._plan = plan
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._balance: Balance | None = None
        self._inode = (0, 0)  # device and inode number of the file
        self._block: int | None = None  # first step of the last block reserved here
        self._since = 0.0
        self._usable = True  # False after a failed commit, until one succeeds

    @classmethod
    def open(cls, folder: Path, plan: Plan | Planned, *, private: bool, spent: int = 0) -> Self:
        """Open the account of a new run that has already taken `spent` steps in memory."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        account = cls(folder, plan)
        account._connect(new=True)
        entries = [("open", 0, plan.steps + plan.closing_count, private)]
        entries += [("reserve", 0, spent, private)] if spent else []
        account._append(entries, run=secrets.token_hex(16))
        return account

    @classmethod
    def resume(cls, folder: Path, plan: Plan | Planned, balance: Balance, *, private: bool) -> Self:
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

    @property
    def run(self) -> str:
        """Identity of the run."""
        return self.balance.run

    def take(self, step: int, private: bool) -> None:
        """Count a step. When this returns, the step is recorded on disk and its noise may be drawn.

        With a fixed seed, a resumed run repeats steps that are already counted.
        """
        balance, entries = self.balance, []
        private = private and bool(balance.private)
        if private != balance.private:
            entries.append(("not private", balance.spent, 0, private))
        if step >= balance.spent:
            count = max(self._block_size(step), step + 1 - balance.spent)  # `step` is counted too
            entries.append(("reserve", balance.spent, count, private))
        if entries or not self._usable:  # after a failure, an empty commit tests the file
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
        left = self._plan.steps - self.balance.spent  # sums after training are taken one by one
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
        self._check_inode()
        balance = self._balance
        with explained(self._path), transaction(connection):
            if run:
                balance = create(connection, self.folder)
            elif last_event(connection) != self.balance.head:
                raise OwnerwiseError(
                    f"another process or PrivateStep has taken steps from the account of "
                    f"{self.folder}: only one may train a run; restore the run to continue it"
                )
            for kind, first, steps, private in entries:
                number, previous = head_of(balance)
                name, plan = run or self.balance.run, self._plan.hash
                event = Event(number + 1, kind, name, plan, first, steps, private, previous)
                balance = event.applied_to(balance)
                connection.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*event.values, event.hash),
                )
        self._balance = balance
        self._check_inode()
        self._usable = True

    def _connect(self, new: bool = False) -> sqlite3.Connection:
        if self._connection is None:
            with explained(self._path):
                connection = connect(self._path, "rwc" if new else "rw")
                self._connection = connection
                self._finalizer = weakref.finalize(self, _close, connection, self._process)
                # not WAL: a copy of the file without its log would lack the newest events
                connection.execute("PRAGMA journal_mode = DELETE")
                connection.execute("PRAGMA synchronous = EXTRA")
            status = os.stat(self._path)
            if self._balance is None:
                self._inode = status.st_dev, status.st_ino
        return self._connection

    def _check_inode(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != self._inode:
            raise OwnerwiseError(
                f"{self._path} was deleted or replaced during the run: its steps can no longer be "
                "counted, so the run stops"
            )


def _close(connection: sqlite3.Connection, process: int) -> None:
    if os.getpid() == process:  # SQLite must not be touched in a forked process
        connection.close()
