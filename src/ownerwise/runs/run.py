"""Runs: what a training leaves behind, in memory or in a folder of its own.

A run folder holds `config.json` (what the Trainer was given), `plan.json` with its arrays,
`history.jsonl` (one line per evaluation, of validation data only), `steps.json` and the newest
checkpoint (see `checkpoints`), `environment.json`, and once the run has ended `report.html` and
`CARD.md`. None of it holds training records or statistics of them without noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.planning import (
    Plan,
)
from ownerwise.step import checkpoints

CONFIG = "config.json"
PLAN = "plan.json"
HISTORY = "history.jsonl"
ENVIRONMENT = "environment.json"
REPORT = "report.html"
CARD = "CARD.md"


@dataclass(eq=False)
class Run:
    """A training run: its settings, its plan and its history. `Run.load(folder)` reads one.

    Attributes:
        config: the Trainer's settings, as JSON types.
        plan: the plan; without owners if the run was loaded.
        history: one entry per evaluation: "step", "updates", "seconds", "learning_rate",
            "validation" (None without validation data) and, in the last one, perhaps "test".
            Measured on validation and test data, which NO guarantee covers.
        environment: versions of what ran.
        steps_spent: steps accounted.
        updates: updates that the model has received; fewer than `steps_spent` where a private run
            was resumed after a crash.
        folder: the run folder, or None for a run in memory.
    """

    config: dict[str, Any]
    plan: Plan = field(repr=False)
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    environment: dict[str, Any] = field(default_factory=dict, repr=False)
    steps_spent: int = 0
    updates: int = 0
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config["name"]

    @property
    def label(self) -> str:
        """Method, as tables and legends show it; runs with one label are seeds of one method."""
        return self.config["label"]

    @property
    def seed(self) -> int | None:
        """The fixed seed of a run that is NOT private, else None."""
        return self.config["seed"]

    @property
    def private(self) -> bool:
        """Whether the guarantee holds: secret randomness, and nothing un-noised besides."""
        return not self.not_private

    @property
    def not_private(self) -> list[str]:
        """Why the guarantee does not hold; empty if it does."""
        fixed = [] if self.seed is None else [f"fixed seed {self.seed}"]
        return fixed + list(self.config.get("not_private", ()))

    @property
    def group_budgets(self) -> dict[str, float]:
        """Epsilon of each validation group that has one."""
        return self.config["group_budgets"]

    def epsilon(self) -> np.ndarray:
        """Return what every owner's records have spent."""
        return self.plan.epsilon(steps=self.steps_spent)

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors in the newest checkpoint, for `model.load_state_dict`."""
        newest = None if self.folder is None else checkpoints.latest(self.folder)
        if newest is None:
            where = "a run in memory" if self.folder is None else self.folder
            raise OwnerwiseError(f"{where} has no checkpoint: train with folder=, to a first one")
        return checkpoints.weights(newest)

    def report(self, path: str | PathLike, *others: Run) -> None:
        """Write the HTML report of this run, beside others if given."""
        from ownerwise.report import write_report

        write_report([self, *others], path)

    def card(self, path: str | PathLike) -> None:
        """Write the privacy card of this run."""
        from ownerwise.report import (
            write_card,
        )

        write_card(self, path)

    @classmethod
    def load(cls, folder: str | PathLike) -> Self:
        """Read a run folder; a run that is under way, or was stopped, can be read too."""
        folder = Path(folder)
        config = read_json(folder / CONFIG, "a run folder has one")
        plan = Plan.load(folder / PLAN)
        newest = checkpoints.latest(folder)
        return cls(
            config=config,
            plan=plan,
            history=read_history(folder / HISTORY),
            environment=read_json(folder / ENVIRONMENT, "a run folder has one"),
            steps_spent=spent_steps(folder),
            updates=0 if newest is None else int(newest.stem.rpartition("-")[2]),
            folder=folder,
        )


def default_label(plan: Plan, weights: Mapping[str, Any] | None) -> str:
    """Return the name of the method from the plan's method and the weights' settings."""
    if weights is None:
        label = "DP-SGD" if plan.method == "uniform" else "IDP-SGD"
    else:
        label = f"{weights['kind']}-SGD"
        if weights.get("kappa"):
            label += " budget-aware"
    usual = ("uniform", "sample") if weights is None else ("sample",)
    return label if plan.method in usual else f"{label} ({plan.method})"


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return the JSON object in `path`, or say what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OwnerwiseError(f"no {path.name} in {path.parent}: {hint}") from None
    except ValueError:
        raise OwnerwiseError(f"{path} is damaged: expected JSON") from None
    if not isinstance(found, dict):
        raise OwnerwiseError(f"{path} is damaged: expected a JSON object")
    return found


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a history; half a last line, left by a killed process, is dropped."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is half a line
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        raise OwnerwiseError(f"{path} is damaged: expected one JSON object a line") from None


def spent_steps(folder: Path) -> int:
    """Return the steps that the folder's ledger accounts for; 0 before it is written."""
    path = folder / checkpoints.LEDGER
    return int(read_json(path, "")["steps_spent"]) if path.exists() else 0
