"""One run of an experiment, which turns a setting, a method and a seed into a result.

Every run has a fixed seed and can be repeated. Runs use public data for research and are NOT
PRIVATE, as their results state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ownerwise.config.build import make_model, stored_plan, training_options
from ownerwise.config.reading import Config, make_config
from ownerwise.evaluation import (
    Evaluation,
)
from ownerwise.mechanisms import (
    Loss,
)
from ownerwise.owners import (
    Owners,
)
from ownerwise.planning import (
    Plan,
    plan,
)
from ownerwise.repair import as_calibration
from ownerwise.runs import (
    Run,
    environment,
)
from ownerwise.training import (
    Trainer,
)
from ownerwise.training.loggers import Line
from ownerwise_reproduction.counting import counted, gradients
from ownerwise_reproduction.methods import Method, Phase
from ownerwise_reproduction.outcomes import Cells
from ownerwise_reproduction.plain import train_plainly
from ownerwise_reproduction.population import Population, populate
from ownerwise_reproduction.settings import Setting

Report = Callable[[int], None]
"""report(steps) is called with the number of steps taken so far."""

PLAIN_MOMENTUM = 0.9
"""Momentum of plain SGD, the non-private method."""

_MOST_OWNERS_LISTED = 100


@dataclass(frozen=True, eq=False)
class Trial:
    """A run to perform, defined by a setting, a method and a seed.

    Attributes:
        setting: the setting.
        method: the method.
        seed: seed for noise, batches, initial weights and random owners.
        profile: "paper" or "short".
        changes: strings "section.key=value".
    """

    setting: Setting
    method: Method
    seed: int
    profile: str = "paper"
    changes: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The configuration that the method trains with."""
        asked = self.setting.configure(self.seed, self.profile, self.changes)
        return make_config(self.method.sections(asked.sections), name=self.setting.name)

    @property
    def name(self) -> str:
        """Name for progress lines and errors."""
        return f"{self.setting.name} {self.method.slug} seed {self.seed}"


def run_trial(
    trial: Trial,
    folder: str | PathLike,
    data_dir: str | PathLike | None = None,
    report: Report = lambda steps: None,
) -> dict[str, Any]:
    """Train and return the measurements as JSON-compatible values.

    Args:
        trial: the trial to run.
        folder: folder for the run folders of all phases; runs found there are resumed.
        data_dir: folder of the data sets.
        report: function that receives the number of steps taken.
    """
    since = time.perf_counter()
    config = trial.config
    population = populate(config, trial.setting.label_noise, data_dir)
    cells = Cells.of(population.assignment, population.data.classes)
    phases = trial.method.phases(population, config["plan"], trial.seed)
    model = make_model(config, population.data)
    options = training_options(config)
    options["clipping"] = clipping = counted(options["clipping"])
    if trial.method.private:
        runs = _train(trial, config, model, options, phases, cells, Path(folder), report)
        lines = [line for run in runs for line in run.history]
        plans = [run.plan for run in runs]
    else:
        lines = _train_plainly(trial, config, model, options["loss"], phases[0], cells, report)
        plans = []
    described = [_described(made, population.owners()) for made in plans]
    history = _joined(lines, cells)
    last = lines[-1]
    return {
        "setting": trial.setting.name,
        "title": trial.setting.title,
        "profile": trial.profile,
        "changes": list(trial.changes),
        "method": trial.method.slug,
        "spec": trial.method.spec,
        "label": trial.method.label,
        "seed": trial.seed,
        "not_private": [f"science: fixed seed {trial.seed}", *trial.method.notes],
        "config": {name: dict(config[name]) for name in config.sections},
        "data": repr(population.data),
        "owners": population.assignment.description,
        "budgets": dict(cells.budgets),
        "evaluated_on": "test" if population.test is None else "validation",
        "plans": described,
        "within_budgets": bool(described) and all(one["within_budgets"] for one in described),
        "gradients": gradients(clipping, [phase.plan for phase in phases]),
        "history": history,
        "final": cells.line(last.get("test") or last["validation"]),
        "validation": cells.line(last["validation"]),
        "train_seconds": history[-1]["seconds"],
        "wall_seconds": round(time.perf_counter() - since, 2),
        "environment": environment(),
    }


def _train(
    trial: Trial,
    config: Config,
    model: torch.nn.Module,
    options: dict[str, Any],
    phases: Sequence[Phase],
    cells: Cells,
    folder: Path,
    report: Report,
) -> list[Run]:
    """Train one phase after another; phases that have already finished are loaded, not repeated."""
    runs = []
    before = 0
    for number, phase in enumerate(phases, 1):
        place = folder / f"phase-{number}" if len(phases) > 1 else folder
        owners = phase.population.owners()
        made = stored_plan(place, owners) or _planned(owners, phase)
        trainer = Trainer(
            model,
            made,
            **options,
            seed=trial.seed + 1000 * (number - 1),  # no noise is reused
            folder=place,
            name=trial.name,
            label=trial.method.label,
            evaluate_every=config["run"]["evaluate_every"],
            group_budgets=cells.cell_budgets,
            loggers=[_Reporting(report, before)],
            progress=False,
            notes={"data": repr(phase.population.data), "not_private": list(trial.method.notes)},
        )
        runs.append(_fit(trainer, phase.population, cells))
        before += made.steps
    return runs


def _planned(owners: Owners, phase: Phase) -> Plan:
    wanted = dict(phase.plan)
    calibration = as_calibration(wanted.pop("calibration", None))
    return plan(owners, **wanted, calibration=calibration)


def _fit(trainer: Trainer, population: Population, cells: Cells) -> Run:
    options: dict[str, Any] = {
        "validation": population.validation.tensors(),
        "validation_groups": cells.names(population.validation),
    }
    if population.test is not None:
        options["test"] = population.test.tensors()
        options["test_groups"] = cells.names(population.test)
    return trainer.fit(population.data.train.tensors(), resume=True, **options)


def _train_plainly(
    trial: Trial,
    config: Config,
    model: torch.nn.Module,
    loss: Loss,
    phase: Phase,
    cells: Cells,
    report: Report,
) -> list[dict[str, Any]]:
    population, test = phase.population, phase.population.test
    return train_plainly(
        model,
        _plain_optimizer(trial, config, model),
        loss,
        population.data.train.tensors(),
        steps=config["plan"]["steps"],
        batch_size=round(config["plan"]["batch_size"]),
        seed=trial.seed,
        validation=Evaluation(population.validation.tensors(), cells.names(population.validation)),
        test=None if test is None else Evaluation(test.tensors(), cells.names(test)),
        evaluate_every=config["run"]["evaluate_every"],
        report=report,
    )


def _plain_optimizer(trial: Trial, config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return Adam where the setting uses it, otherwise SGD with momentum."""
    if config["training"].get("optimizer") == "adam":
        return torch.optim.Adam(model.parameters(), lr=trial.setting.plain_lr)
    parameters, rate = model.parameters(), trial.setting.plain_lr
    return torch.optim.SGD(parameters, lr=rate, momentum=PLAIN_MOMENTUM)


def _joined(lines: Sequence[dict[str, Any]], cells: Cells) -> list[dict[str, Any]]:
    """Return a single history that covers all phases.

    Steps and seconds are cumulative over the phases; each evaluated model appears once.
    """
    history: list[dict[str, Any]] = []
    steps, seconds = 0, 0.0
    for line in lines:
        if line["step"] == 0 and history:
            steps, seconds = history[-1]["step"], history[-1]["seconds"]
            continue
        history.append(
            {
                "step": steps + line["step"],
                "seconds": round(seconds + line["seconds"], 4),
                "learning_rate": line["learning_rate"],
                **cells.line(line["validation"]),
            }
        )
    return history


def _described(made: Plan, declared: Owners) -> dict[str, Any]:
    """Return a summary of a plan and its budgets, which lists up to 100 owners by name."""
    assert made.owners is not None
    ids = made.owners.ids
    spent, budgets = made.epsilon(), declared.epsilon[np.searchsorted(declared.ids, ids)]
    described = {
        "hash": made.hash,
        "method": made.method,
        "accountant": made.accountant,
        "steps": made.steps,
        "expected_batch_size": made.expected_batch_size,
        "noise_std": made.noise_std,
        "records": int(made.records.sum()),
        "epsilon_spent": [float(spent.min()), float(spent.max())],
        "within_budgets": bool((spent <= budgets).all()),
    }
    if made.closing_std is not None:
        described["calibration_noise_std"] = made.closing_std
    if len(ids) <= _MOST_OWNERS_LISTED:
        described["owners"] = {
            str(name): {
                "budget": float(budgets[at]),
                "epsilon_spent": float(spent[at]),
                "sampling_rate": float(made.sampling_rates[at]),
                "clip_norm": float(made.clip_norms[at]),
                "records": int(made.records[at]),
            }
            for at, name in enumerate(ids.tolist())
        }
    return described


class _Reporting:
    """A logger that reports the number of steps taken."""

    def __init__(self, report: Report, before: int):
        self._report = report
        self._before = before

    def start(self, run: Run) -> None:
        """Do nothing."""

    def log(self, line: Line) -> None:
        """Report the number of steps in a history line."""
        self._report(self._before + line["step"])

    def finish(self, run: Run) -> None:
        """Do nothing."""
