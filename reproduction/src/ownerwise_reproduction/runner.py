"""Run trials that have no result yet, one after another or in several processes.

A run that was killed resumes from its checkpoint when the same command is run again; because its
seed is fixed, it reaches the same result. Each process uses one thread: for small networks, this is
faster than one process with several threads.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ownerwise.errors import OwnerwiseError
from ownerwise.training.interruption import Interrupted
from ownerwise_reproduction.progress import Progress
from ownerwise_reproduction.results import Store, made_from, trial_hash
from ownerwise_reproduction.summary import heading
from ownerwise_reproduction.trials import Report, Trial, run_trial

_THREADS = "OMP_NUM_THREADS"  # read when a process loads torch
_POLL = 0.5  # seconds between two checks of the processes


class FailedRuns(OwnerwiseError):
    """Some runs failed; all others have results."""


def run_trials(
    trials: Sequence[Trial],
    store: Store,
    *,
    data_dir: str | PathLike | None = None,
    jobs: int = 1,
    keep_runs: bool = False,
    quiet: bool = False,
) -> list[Path]:
    """Run trials that have no result yet; return the paths of all results in the order of trials.

    If a result already exists under another heading, it is kept and a message says so.

    Args:
        trials: the trials to run.
        store: the store for the results.
        data_dir: folder of the data sets.
        jobs: number of parallel processes; with 1, the trials run in this process.
        keep_runs: keep the run folder (plan, history, model) next to each result.
        quiet: show no progress.

    Raises:
        OwnerwiseError: if settings or data have problems; raised before anything runs.
        FailedRuns: if some runs failed; raised after all others have finished.
        Interrupted: on Ctrl-C; making the same call again resumes the runs.
    """
    places = _places(trials, store, data_dir)
    missing = {path: trial for path, trial in zip(places, trials, strict=True) if not path.exists()}
    steps = {path: trial.config["plan"]["steps"] for path, trial in missing.items()}
    names = {path: trial.name for path, trial in missing.items()}
    progress = Progress(names, steps, len(set(places)), quiet)
    if not quiet:
        _say_other_names(trials, places, store)
    try:
        if jobs == 1:
            for path, trial in missing.items():
                _settle(
                    path,
                    progress,
                    partial(run_one, trial, path, data_dir, keep_runs, progress.reporter(path)),
                )
        elif missing:
            _run_in_processes(missing, data_dir, keep_runs, jobs, progress)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; the results so far are in {store.folder}; run the same command to resume"
        ) from None
    if progress.failures:
        raise FailedRuns(progress.failures)
    return places


def _settle(path: Path, progress: Progress, run: Callable[[], dict[str, Any]]) -> None:
    """Record how a run ended; a failure does not stop the other runs."""
    try:
        progress.finished(path, run())
    except OwnerwiseError as error:
        progress.failed(path, error.problems)


def _places(trials: Sequence[Trial], store: Store, data_dir: str | PathLike | None) -> list[Path]:
    """Return the paths of the results.

    If there are problems with settings or data, raise an error that lists all of them.
    """
    places: list[Path] = []
    problems: list[str] = []
    for trial in trials:
        try:
            places.append(store.path(trial, trial_hash(trial, data_dir)))
        except OwnerwiseError as error:
            problems += [f"{trial.setting.name}: {text}" for text in error.problems]
    if problems:
        raise OwnerwiseError(list(dict.fromkeys(problems)))
    return places


def _say_other_names(trials: Sequence[Trial], places: Sequence[Path], store: Store) -> None:
    """Report results that exist under another heading because they use the same values."""
    for trial, path in zip(trials, places, strict=True):
        if path.exists():
            found = store.read_one(path)
            there = heading(found["setting"], found["profile"], found["changes"])
            if there != heading(trial.setting.name, trial.profile, trial.changes):
                print(f"{trial.name}: already done as {there}", file=sys.stderr, flush=True)


def run_one(
    trial: Trial,
    path: Path,
    data_dir: str | PathLike | None = None,
    keep_runs: bool = False,
    report: Report = lambda steps: None,
) -> dict[str, Any]:
    """Run a trial, write its result to `path`, and return it."""
    folder = path.with_suffix("")
    result = run_trial(trial, folder, data_dir, report) | made_from(trial)
    result["hash"] = path.stem.rpartition("-")[2]
    Store(path.parent).write(path, result)
    if folder.is_dir() and not keep_runs:
        shutil.rmtree(folder)
    return result


def _run_in_processes(
    missing: Mapping[Path, Trial],
    data_dir: str | PathLike | None,
    keep_runs: bool,
    jobs: int,
    progress: Progress,
) -> None:
    context = multiprocessing.get_context("spawn")
    queue, stop = context.Queue(), context.Event()
    with _single_threads():
        pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(queue, stop))
        try:
            waiting: dict[Future, Path] = {
                pool.submit(_run_reporting, trial, path, data_dir, keep_runs): path
                for path, trial in missing.items()
            }
            while waiting:
                done, _ = wait(waiting, _POLL, FIRST_COMPLETED)
                while not queue.empty():
                    progress.advanced(*queue.get())
                for future in done:
                    _settle(waiting.pop(future), progress, future.result)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _single_threads() -> Iterator[None]:
    """Limit processes started in this context to one thread each."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


_to_parent: tuple[Any, Any] | None = None  # queue and stop, in a process that runs trials


def _begin(queue: Any, stop: Any) -> None:
    global _to_parent
    _to_parent = queue, stop
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_reporting(
    trial: Trial, path: Path, data_dir: str | PathLike | None, keep_runs: bool
) -> dict[str, Any]:
    assert _to_parent is not None
    queue, stop = _to_parent

    def report(steps: int) -> None:
        queue.put((path, steps))
        if stop.is_set():
            raise KeyboardInterrupt  # the checkpoint for these steps has been written

    return run_one(trial, path, data_dir, keep_runs, report)
