"""Run folders during training, each with a single process, a single run and no partial files.

A process holds the lock on its folder while it trains. The operating system releases the lock when
the process ends, even if it crashes. Forked processes, such as the workers of a DataLoader, do not
hold the lock, because they may outlive the run (filelock closes their copy of the file).

A killed run resumes from its newest checkpoint. History lines written after that checkpoint
describe lost updates and are dropped, so the history always matches the current model. With a fixed
seed the same lines are written again, bit for bit (except for times). In a private run, the new
lines come from fresh noise; the steps described by the lost lines still count as spent, because
someone may have read those lines.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.files import ANYTHING, drop_temporary, mapping_of, read_json, write_json, writing
from ownerwise.planning import Plan, PlanRequest
from ownerwise.runs import reading
from ownerwise.runs.run import Run
from ownerwise.runs.settings import differences
from ownerwise.step import OWN_FOLDER_ADVICE, checkpoints, read_account

_LOCK = ".lock"
_HOLDER = ".holder"  # names the lock's holder: some systems cannot read a locked file

MAY_CHANGE = frozenset(
    {"name", "label", "micro_batch_size", "lean", "num_workers", "checkpoint_every", "loggers"}
    | {"device", "processes", "earlier_trainings"}
)
"""Settings that a resumed run may change, because they affect names and speed, not results."""

ADDED_LATER = frozenset({"prediction", "held_out_owners"})
"""Settings that follow from the others, which runs of earlier versions lack. A resumed run gets
them. Add a setting here only if its absence changes nothing about training."""

IF_ABSENT: dict[str, Any] = {
    **{f"settings.plan.{f.name}": f.default for f in dataclasses.fields(PlanRequest)},
    "settings.data.scale": "ranges",
    "settings.data.split_by": "record",
    "settings.data.test_share": 0.2,
    "settings.data.validation_seed": 0,
    "settings.owners.named": True,
}
"""Values that stand for keys that a configuration leaves out, so a key that was added later, or is
now written out, changes nothing as long as it has the value that the run was trained with."""


ALREADY_A_RUN = (
    "{} already contains a run; resume it (resume=True, or --resume), or " + OWN_FOLDER_ADVICE
)


class FolderLock:
    """Locks a run folder for this process: `with FolderLock(folder): ...`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = FileLock((folder / _LOCK).resolve(), blocking=False)
        self._process = os.getpid()

    def __enter__(self) -> Self:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise OwnerwiseError(
                    f"{self._folder} is in use: {self._holder()} is training there; wait for it to "
                    f"finish, or {OWN_FOLDER_ADVICE}"
                ) from None
            try:
                (self._folder / _HOLDER).write_text(f"{os.getpid()}\n", encoding="utf-8")
            except OSError:
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._process:  # a forked process does not hold the lock
            try:
                with writing(self._folder):
                    (self._folder / _HOLDER).unlink(missing_ok=True)
            finally:
                self._lock.release()

    def _holder(self) -> str:
        try:
            process = (self._folder / _HOLDER).read_text(encoding="utf-8").strip()
        except OSError:
            process = "unknown"
        return "this process" if process == str(os.getpid()) else f"process {process}"


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder contains a checkpoint from which a run can be resumed."""
    return checkpoints.latest(folder) is not None


def folder_problems(folder: Path, config: dict[str, Any], plan: Plan, resume: bool) -> list[str]:
    """Return all reasons why a run with these settings cannot be written to a folder."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file; expected a folder for the run"]
    problems, unused = Problems(), Problems()
    with problems.guard():
        if not holds_a_run(folder):
            return _remains(folder)
        if not resume:
            return [ALREADY_A_RUN.format(folder)]
        stored, identity = reading.read_config(folder)
        may_differ = MAY_CHANGE | (ADDED_LATER - stored.keys())
        if "settings" in stored.keys() & config.keys():
            may_differ |= {"data"}  # words for what the settings state
        changes = differences(stored, config, may_differ, IF_ABSENT)
        changes += [f"plan: {text}" for text in _plan_differences(folder, plan)]
        if changes:
            return [f"{change} (a resumed run keeps its original settings)" for change in changes]
        balance, header = read_account(folder), checkpoints.newest_header(folder, unused)
        run = balance.run if balance else ""
        history = reading.read_history(folder / reading.HISTORY, run, unused)
        problems += reading.disagreements(
            folder, plan.hash, balance, header, stored, identity, history
        )
    return list(problems)


def begin(run: Run) -> None:
    """Write a run's plan, environment and settings into its folder.

    The settings come last: a folder without them is refused, so no run lacks the other files.
    """
    assert run.folder is not None
    run.plan.save(run.folder / reading.PLAN)
    write_json(run.folder / reading.ENVIRONMENT, run.environment)
    names = {reading.FORMAT_KEY: checkpoints.FORMAT, reading.RUN_KEY: run.identity}
    write_json(run.folder / reading.CONFIG, {**names, **run.config})


def with_earlier(folder: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the environment, together with earlier ones in which the run was trained."""
    previous = reading.read_environment(folder, problems := Problems())
    problems.warn()
    earlier = previous.pop("earlier", [])
    earlier += [previous] if previous and previous != environment else []
    return {**environment, "earlier": earlier} if earlier else environment


def kept_history(folder: Path, identity: str, updates: int) -> list[dict[str, Any]]:
    """Return the history lines for models with at most `updates` updates."""
    lines = reading.read_history(folder / reading.HISTORY, identity, problems := Problems())
    problems.warn()
    return [line for line in lines if line["updates"] <= updates]


def drop_half_written(folder: Path) -> None:
    """Delete partial files left by a killed process; only the lock's holder may call this."""
    with writing(folder):
        for name in ("checkpoint-*", "plan.*", "config.json", "environment.json", "history.jsonl"):
            drop_temporary(folder, name)


def _remains(folder: Path) -> list[str]:
    """Return the reasons why a folder without a checkpoint cannot be used for a new run."""
    balance = read_account(folder)
    if balance is not None and balance.spent:
        return [
            f"{folder} has an account with {balance.spent} spent steps but no checkpoint to resume "
            f"from: {OWN_FOLDER_ADVICE}"
        ]
    if balance is None and (folder / reading.CONFIG).exists() and reading.read_config(folder)[1]:
        return [f"{folder} contains a run whose account is missing: {OWN_FOLDER_ADVICE}"]
    return []


def _plan_differences(folder: Path, plan: Plan) -> list[str]:
    path = folder / reading.PLAN
    stored = read_json(path, mapping_of(ANYTHING), f"no {path.name} in {folder}: {reading.NO_RUN}")
    if stored.pop("hash", None) == plan.hash:
        return []
    stored.pop("arrays", None)
    headers = differences(stored, plan.header())
    return headers or ["the owners' budgets, rates or clip norms differ"]
