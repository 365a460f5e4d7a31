"""Run folders during training: one process per folder, one run per folder, no partial files.

A process holds the lock on its folder while it trains. The operating system releases the lock when
the process ends, however it ends.

History after a resumption: a killed run resumes from its newest checkpoint. History lines written
after that checkpoint describe lost updates and are dropped, so that the history always belongs to
the current model. With a fixed seed the same lines are written again, bit for bit (except for
times). In a private run, the new lines come from fresh noise; the ledger still counts the steps
behind the lost lines as spent, because somebody may have read them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_json
from ownerwise.planning import Plan
from ownerwise.runs import run as runs
from ownerwise.runs.settings import differences
from ownerwise.step import checkpoints

_LOCK = ".lock"
_HOLDER = ".holder"  # the process that holds the lock: a locked file cannot be read on all systems

MAY_CHANGE = frozenset(
    {"name", "label", "micro_batch_size", "lean", "num_workers", "checkpoint_every", "loggers"}
)
"""Settings that a resumed run may change, because they affect names and speed, not results."""


class FolderLock:
    """Locks a run folder for this process: `with FolderLock(folder): ...`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = FileLock((folder / _LOCK).resolve(), blocking=False)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise OwnerwiseError(
                f"{self._folder} is in use: {self._holder()} is training into it; wait for it, or "
                f"{checkpoints.OWN_FOLDER}"
            ) from None
        (self._folder / _HOLDER).write_text(f"{os.getpid()}\n", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        (self._folder / _HOLDER).unlink(missing_ok=True)
        self._lock.release()

    def _holder(self) -> str:
        try:
            process = (self._folder / _HOLDER).read_text(encoding="utf-8").strip()
        except OSError:
            process = "unknown"
        return "this process" if process == str(os.getpid()) else f"process {process}"


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder holds a run that can be resumed, that is, a checkpoint."""
    return checkpoints.latest(folder) is not None


def folder_problems(folder: Path, config: dict[str, Any], plan: Plan, resume: bool) -> list[str]:
    """Return all reasons why a run with these settings cannot be written to a folder."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file; expected a folder for the run"]
    if not holds_a_run(folder):
        spent = runs.spent_steps(folder)
        if spent:
            return [
                f"{folder} has a ledger of {spent} spent steps but no checkpoint to resume from: "
                f"{checkpoints.OWN_FOLDER}"
            ]
        return []
    if not resume:
        return [
            f"{folder} already holds a run; resume it (resume=True, or --resume), or "
            f"{checkpoints.OWN_FOLDER}"
        ]
    try:
        stored = runs.read_config(folder)
    except OwnerwiseError as error:
        return error.problems
    changes = differences(stored, config, MAY_CHANGE)
    changes += [f"plan: {text}" for text in _plan_differences(folder, plan)]
    hint = "a resumed run keeps its original settings"
    return [f"{change} ({hint})" for change in changes]


def begin(
    folder: Path, config: dict[str, Any], plan: Plan, environment: dict[str, Any]
) -> dict[str, Any]:
    """Write a run's settings, plan and environment; return the environment and earlier ones."""
    if holds_a_run(folder):
        previous = runs.read_json(folder / runs.ENVIRONMENT, runs.NO_RUN)
        earlier = previous.pop("earlier", []) + ([previous] if previous != environment else [])
        if earlier:
            environment = {**environment, "earlier": earlier}
    write_json(folder / runs.CONFIG, {runs.FORMAT_KEY: checkpoints.FORMAT, **config})
    plan.save(folder / runs.PLAN)
    write_json(folder / runs.ENVIRONMENT, environment)
    return environment


def kept_history(folder: Path, updates: int) -> list[dict[str, Any]]:
    """Return the history lines up to and including the model with `updates` updates."""
    lines = runs.read_history(folder / runs.HISTORY)
    return [line for line in lines if line["updates"] <= updates]


def drop_half_written(folder: Path) -> None:
    """Delete partial files that a killed process left behind."""
    for name in ("checkpoint-*", "plan.*", "*.json", "*.jsonl"):
        for path in folder.glob(f".{name}.????????"):  # as `write_whole` names them
            path.unlink()


def drop_older_checkpoints(folder: Path) -> None:
    """Delete all checkpoints except the newest, from which a run resumes."""
    newest = checkpoints.latest(folder)
    for path in folder.glob("checkpoint-*.safetensors"):
        if path != newest:
            path.unlink()


def _plan_differences(folder: Path, plan: Plan) -> list[str]:
    stored = runs.read_json(folder / runs.PLAN, runs.NO_RUN)
    if stored.pop("hash", None) == plan.hash:
        return []
    stored.pop("arrays", None)
    headers = differences(stored, plan.header())
    return headers or ["the owners' budgets, rates or clip norms differ"]
