"""Runs of a search: trained in memory, judged, and forgotten unless they are the best.

Guarantee. How many runs are made, which candidates they try and how they score stay in memory: a
run writes no file, shows no progress, issues no warning and is not counted among the trainings of
this process. The cost of the whole search is on disk, in full, before the first run begins, and is
never given back. So a search that crashes or is interrupted has charged everything and shown
nothing. A run that fails counts as a run with the worst score, because whether it fails may depend
on the records. How long a search takes is outside the guarantee unless `always_run` is set: the
same number of runs is then made whatever K is, and the first K of them count.
"""

from __future__ import annotations

import logging
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ownerwise.batches import Collate, PoissonBatches
from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.files import write_json
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream
from ownerwise.runs import Run
from ownerwise.runs import folders as run_folders
from ownerwise.runs.reading import HISTORY, PLAN
from ownerwise.step import PrivateStep
from ownerwise.training import Trainer, note_training
from ownerwise.training.loggers import JsonLines
from ownerwise.tuning.candidates import Candidate
from ownerwise.tuning.scores import PaidScore, PublicScore

CHARGE = "tuning.json"
"""Name of the file in a run folder that says that a search was charged there."""

STOPPED = (
    "tuning was stopped: its whole cost counts as spent, and nothing is released. Another search "
    "costs as much again"
)
NOTHING_RELEASED = (
    "the search released no model: no run succeeded. Its whole cost counts as spent. Try the "
    "candidates on public data first"
)


@dataclass(frozen=True)
class Search:
    """A search that is ready to start, with everything public about it.

    Attributes:
        candidates: the candidates, fixed in advance.
        plans: the plan of each candidate, with the epsilons of the whole search.
        data: the training records, (X, y) or a Dataset.
        score: function from a trained model to its score; larger is better.
        fit_options: further arguments of `Trainer.fit`, such as test data.
        described: what the report says about the search.
        seed: a fixed seed, which makes the search NOT PRIVATE; None for secret randomness.
        folder: where the result is written; None keeps it in memory.
    """

    candidates: Sequence[Candidate]
    plans: Sequence[Plan]
    data: Any
    score: Callable[[nn.Module], float]
    stream: SecretStream
    fit_options: Mapping[str, Any]
    described: Mapping[str, Any]
    seed: int | None = None
    folder: Path | None = None


def search(given: Search) -> Run:
    """Make the runs of a search and return the best; see the guarantee above."""
    plan = given.plans[0]
    lock = nullcontext() if given.folder is None else run_folders.FolderLock(given.folder)
    with lock:
        Problems(folder_problems(given.folder)).raise_()  # again, now that nobody else can write
        _charge(given)
        earlier = note_training(plan) if given.seed is None else 0
        stopped, chosen = False, None
        with _same_random_numbers_after():
            try:
                chosen = _best(given)
            except KeyboardInterrupt:
                stopped = True
        if stopped:  # outside of `except`: the first error holds every variable of the search
            raise KeyboardInterrupt(STOPPED)
        if chosen is None or chosen.trainer is None:
            raise OwnerwiseError(NOTHING_RELEASED)
        return _released(given, chosen, earlier)


def _best(given: Search) -> _Trial | None:
    """Make the runs, and return the best or the fixed output for K = 0."""
    tuning = given.plans[0].tuning
    assert tuning is not None
    draws = given.stream.child("tuning").at_step(0)
    runs = tuning.law.number(float(draws.uniforms(1)[0]))
    best: _Trial | None = None
    for number in range(runs if tuning.most is None else tuning.most):
        choice = int(draws.integers(len(given.candidates), 1)[0])
        trial = _Trial(given, choice, number, int(draws.integers(2**62, 1)[0]))
        trial.make()
        if number < runs and (best is None or trial.score > best.score):
            best = trial
    if runs == 0:
        best = _Trial(given, 0, 0, 0)
        best.leave_untrained()
    return best


class _Trial:
    """One run of a search."""

    def __init__(self, search: Search, choice: int, number: int, weights: int):
        self._search, self._choice, self._number = search, choice, number
        self._weights = weights  # the seed of the initial weights
        self.score = -math.inf
        self.trainer: TrialTrainer | None = None

    def make(self) -> None:
        """Train a new model and judge it; a failure leaves the worst score and no model."""
        with warnings.catch_warnings(), _silence():
            warnings.simplefilter("ignore")
            try:
                trainer = self._trainer()
                trainer.fit(self._search.data, **self._search.fit_options)
                score = self._search.score(trainer.model)
            except (Exception, SystemExit):  # may depend on the records: it must not be shown
                return
        self.score = score if math.isfinite(score) else -math.inf
        self.trainer = trainer

    def leave_untrained(self) -> None:
        """Set up the fixed output for K = 0: the first candidate's model, before training."""
        self.trainer = self._trainer()
        self.trainer.set_up(self._search.data, self._search.fit_options)

    def _trainer(self) -> TrialTrainer:
        seed = self._search.seed
        with torch.random.fork_rng(devices=[]):  # its state would tell how many models were made
            torch.manual_seed(self._weights)
            return trial_trainer(
                self._search.candidates[self._choice],
                self._search.plans[self._choice],
                None if seed is None else 1000 * seed + self._number,
                self._search.described,
            )


class TrialTrainer(Trainer):
    """A Trainer that keeps its run in memory, is not counted as a training, and keeps its step."""

    in_search = True

    def _note_training(self, config: dict[str, Any], plan: Plan) -> None:
        """Count nothing: the search counts as one training."""

    def set_up(self, data: Any, options: Mapping[str, Any]) -> None:
        """Make all checks, and take no step."""
        vars(self)["takes_steps"] = False
        self.fit(data, **options)

    def _open(self, config: dict[str, Any], step: PrivateStep, resume: bool) -> Run:
        vars(self)["step"] = step
        return super()._open(config, step, resume)

    def _train(
        self,
        batches: PoissonBatches,
        step: PrivateStep,
        recorder: Any,
        data: Any,
        collate: Collate | None,
    ) -> None:
        if vars(self).get("takes_steps", True):
            super()._train(batches, step, recorder, data, collate)


def trial_trainer(
    candidate: Candidate, plan: Plan, seed: int | None, described: Mapping[str, Any]
) -> TrialTrainer:
    """Return the Trainer for one run, with a new model."""
    made = candidate.make_trainer(
        plan,
        kind=TrialTrainer,
        seed=seed,
        notes={"tuning": {**described, "settings": dict(candidate.settings)}},
        folder=None,
        progress=False,
        evaluate_every=plan.steps,
        checkpoint_every=plan.steps,
    )
    assert isinstance(made, TrialTrainer)
    return made


def check(given: Search, score: PublicScore | PaidScore) -> None:
    """Raise an error that lists all problems, before anything is charged: each candidate is set up.

    This is the check that every training begins with, and a trial of the score; nothing is trained.
    """
    problems = Problems()
    if Processes.here().several:
        problems.add(
            "a search in several processes: expected one process, because the runs of a search are "
            "made one after the other in memory; start it without torchrun"
        )
        problems.raise_()
    for candidate, plan in zip(given.candidates, given.plans, strict=True):
        with problems.guard(), torch.random.fork_rng(devices=[]):
            trainer = trial_trainer(candidate, plan, 0, given.described)
            trainer.set_up(given.data, given.fit_options)
            problems += score.problems_with(trainer.model)
    Problems(dict.fromkeys(problems)).raise_()


def _charge(given: Search) -> None:
    """Write to disk that the whole search is spent, before its first run."""
    if given.folder is None:
        return
    given.plans[0].save(given.folder / PLAN)
    write_json(
        given.folder / CHARGE,
        {
            "charged": "the whole search; nothing is given back",
            "plan": given.plans[0].hash,
            **given.described,
        },
    )


def _released(given: Search, best: _Trial, earlier: int) -> Run:
    """Return the best run, written to the folder like any other run."""
    trainer = best.trainer
    assert trainer is not None
    run = trainer.runs[0]
    run.model = trainer.model
    if earlier:
        run.config["earlier_trainings"] = earlier
    for line in run.history:
        line["seconds"] = 0.0  # times tell how busy the machine was, and with what
    if given.folder is None:
        return run
    run.folder = given.folder
    run.config["name"] = given.described.get("name") or given.folder.resolve().name
    step: PrivateStep = vars(trainer)["step"]
    step.open_account(given.folder, private=run.private)
    step.save(given.folder)
    run.identity = step.run_id
    run_folders.begin(run)
    logger = JsonLines(given.folder / HISTORY)
    logger.start(run)
    for line in run.history:
        logger.log(line)
    logger.finish(run)
    return run


@contextmanager
def _silence() -> Iterator[None]:
    """Hide what a run prints and logs."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.CRITICAL))
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(level)


@contextmanager
def _same_random_numbers_after() -> Iterator[None]:
    """Restore the global random numbers: how many were drawn would tell how many runs were made."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def folder_problems(folder: Path | None) -> list[str]:
    """Return the reasons why the result of a search cannot be written to a folder."""
    if folder is None:
        return []
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file; expected a folder for the run"]
    if run_folders.holds_a_run(folder):
        return [run_folders.ALREADY_A_RUN.format(folder)]
    if (folder / CHARGE).exists():
        return [
            f"a search was stopped in {folder}: its whole cost counts as spent, and it cannot be "
            "resumed. A new search costs as much again; give it its own folder"
        ]
    return []
