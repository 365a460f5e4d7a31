"""Run folders while a run is written: one process, one run, and nothing half-written.

A folder is locked as long as its process lives. The lock is the system's, so that of a dead process
is gone with it, however it died.

History of a resumed run. A run that was killed goes on from its newest checkpoint, and whatever
history was written after that checkpoint tells of updates that are lost. Such lines are dropped,
because the history is that of the model which is there. With a fixed seed the same lines come
again, bit for bit (but for their times). In a private run they come from fresh noise; that the lost
lines were written, and may have been read, is in the ledger: their steps stay spent.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, Self

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_json
from ownerwise.planning import (
    Plan,
)
from ownerwise.runs import run as runs
from ownerwise.runs.settings import differences
from ownerwise.step import checkpoints

_LOCK = ".lock"

MAY_CHANGE = frozenset(
    {"name", "label", "micro_batch_size", "lean", "num_workers", "checkpoint_every", "loggers"}
)
"""Settings that a resumed run may change: they decide names and speed, not results."""

_held: set[Path] = set()  # a process may take its own file lock twice, so this is kept besides


class FolderLock:
    """Holds a run folder for this process: `with FolderLock(folder): ...`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._handle: int | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = (self._folder / _LOCK).resolve()
        if self._path in _held:
            raise self._refusal("this process")
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            raise self._refusal(f"process {holder or 'unknown'}") from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle
        _held.add(self._path)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._handle is not None
        _held.discard(self._path)
        os.close(self._handle)  # gives the lock back

    def _refusal(self, holder: str) -> OwnerwiseError:
        return OwnerwiseError(
            f"{self._folder} is in use: {holder} is training into it; wait for it, or give this "
            "run a folder of its own"
        )


def holds_a_run(folder: Path) -> bool:
    """Return whether a run was begun in a folder: its settings, plan and first model are there."""
    return checkpoints.latest(folder) is not None


def folder_problems(folder: Path, config: dict[str, Any], plan: Plan, resume: bool) -> list[str]:
    """Return what keeps a run with these settings from being written into a folder."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file; expected a folder for the run"]
    if not holds_a_run(folder):
        spent = runs.spent_steps(folder)
        if spent:
            return [
                f"{folder} has a ledger of {spent} spent steps but no checkpoint to go on from: "
                "give the run another folder"
            ]
        return []
    if not resume:
        return [
            f"{folder} already holds a run; go on with it (resume=True, or --resume), or give this "
            "run a folder of its own"
        ]
    there = runs.read_json(folder / runs.CONFIG, "the run's settings are missing")
    found = differences(there, config, MAY_CHANGE)
    found += [f"plan: {text}" for text in _plan_differences(folder, plan)]
    hint = "a run goes on with the settings it began with"
    return [f"{text} ({hint})" for text in found]


def begin(
    folder: Path, config: dict[str, Any], plan: Plan, environment: dict[str, Any]
) -> dict[str, Any]:
    """Write what a run is made of, and return its environment, with those before if they differ."""
    if holds_a_run(folder):
        before = runs.read_json(folder / runs.ENVIRONMENT, "a run folder has one")
        earlier = before.pop("earlier", []) + ([before] if before != environment else [])
        if earlier:
            environment = {**environment, "earlier": earlier}
    write_json(folder / runs.CONFIG, config)
    plan.save(folder / runs.PLAN)
    write_json(folder / runs.ENVIRONMENT, environment)
    return environment


def kept_history(folder: Path, updates: int) -> list[dict[str, Any]]:
    """Return the lines that tell of the model with `updates` updates and its past."""
    lines = runs.read_history(folder / runs.HISTORY)
    return [line for line in lines if line["updates"] <= updates]


def drop_half_written(folder: Path) -> None:
    """Remove what a killed process left half-written beside the run's files."""
    for name in ("checkpoint-*", "plan.*", "*.json", "*.jsonl"):
        for path in folder.glob(f".{name}.????????"):  # as `write_whole` names them
            path.unlink()


def drop_older_checkpoints(folder: Path) -> None:
    """Keep the newest checkpoint alone: a run goes on from it."""
    newest = checkpoints.latest(folder)
    for path in folder.glob("checkpoint-*.safetensors"):
        if path != newest:
            path.unlink()


def _plan_differences(folder: Path, plan: Plan) -> list[str]:
    stored = runs.read_json(folder / runs.PLAN, "the run's plan is missing")
    if stored.pop("hash", None) == plan.hash:
        return []
    stored.pop("arrays", None)
    headers = differences(stored, plan.header())
    return headers or ["the owners' budgets, rates or clip norms differ"]
