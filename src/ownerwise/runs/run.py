"""Runs: the result of a training, in memory or in its own folder.

A run folder holds `config.json` (the Trainer's settings and the format version), `plan.json` with
its arrays, `history.jsonl` (one line per evaluation on validation data), `steps.json` and the
newest checkpoint (see `checkpoints`), `environment.json`, and, after the run, `report.html` and
`CARD.md`. These files contain neither training records nor statistics of them without noise.
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
from ownerwise.planning import Plan
from ownerwise.step import checkpoints

CONFIG = "config.json"
PLAN = "plan.json"
HISTORY = "history.jsonl"
ENVIRONMENT = "environment.json"
REPORT = "report.html"
CARD = "CARD.md"
FORMAT_KEY = "run_format"  # in config.json; version 0.1.0 did not write it, which means format 1
NO_RUN = "a run folder has one; check the path"


@dataclass(eq=False)
class Run:
    """A training run: its settings, its plan and its history. `Run.load(folder)` reads one.

    Attributes:
        config: the Trainer's settings, as JSON types.
        plan: the plan; without owners if the run was loaded.
        history: one entry per evaluation: "step", "updates", "seconds", "learning_rate",
            "validation" (None without validation data) and, in the last entry, "test" if there is
            test data. Measured on validation and test data, which NO guarantee covers.
        environment: software versions.
        steps_spent: number of steps accounted for.
        updates: number of updates applied to the model; fewer than `steps_spent` if a private run
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
        """The run's name."""
        return self.config["name"]

    @property
    def label(self) -> str:
        """Method name in tables and legends; runs with the same label are seeds of one method."""
        return self.config["label"]

    @property
    def seed(self) -> int | None:
        """The fixed seed, which makes the run NOT private; None for secret randomness."""
        return self.config["seed"]

    @property
    def private(self) -> bool:
        """Whether the guarantee holds: secret randomness, and nothing computed without noise."""
        return not self.not_private

    @property
    def not_private(self) -> list[str]:
        """Reasons why the guarantee does not hold; empty if it does."""
        fixed = [] if self.seed is None else [f"fixed seed {self.seed}"]
        return fixed + list(self.config.get("not_private", ()))

    @property
    def group_budgets(self) -> dict[str, float]:
        """Epsilon for each validation group that has one."""
        return self.config["group_budgets"]

    def epsilon(self) -> np.ndarray:
        """Return the epsilon spent on each owner's records."""
        return self.plan.epsilon(steps=self.steps_spent)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's tensors from the newest checkpoint, for `model.load_state_dict`."""
        newest = None if self.folder is None else checkpoints.latest(self.folder)
        if newest is None:
            where = "a run in memory" if self.folder is None else self.folder
            raise OwnerwiseError(f"{where} has no checkpoint: train with folder=")
        return checkpoints.state_dict(newest)

    def report(self, path: str | PathLike, *others: Run) -> None:
        """Write an HTML report on this run, compared with any other runs given."""
        from ownerwise.report import write_report

        write_report([self, *others], path)

    def card(self, path: str | PathLike) -> None:
        """Write this run's privacy card."""
        from ownerwise.report import write_card

        write_card(self, path)

    @classmethod
    def load(cls, folder: str | PathLike) -> Self:
        """Read a run folder; the run may be finished, in progress or stopped."""
        folder = Path(folder)
        config = read_config(folder)
        plan = Plan.load(folder / PLAN)
        newest = checkpoints.latest(folder)
        return cls(
            config=config,
            plan=plan,
            history=read_history(folder / HISTORY),
            environment=read_json(folder / ENVIRONMENT, NO_RUN),
            steps_spent=spent_steps(folder),
            updates=0 if newest is None else int(newest.stem.rpartition("-")[2]),
            folder=folder,
        )


def default_label(plan: Plan, weights: Mapping[str, Any] | None) -> str:
    """Return the method's name, given the plan's method and the weights' settings."""
    if weights is None:
        label = "DP-SGD" if plan.method == "uniform" else "IDP-SGD"
    else:
        label = f"{weights['kind']}-SGD"
        if weights.get("kappa"):
            label += " budget-aware"
    usual = ("uniform", "sample") if weights is None else ("sample",)
    return label if plan.method in usual else f"{label} ({plan.method})"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in a run folder; raise if its format is unknown."""
    config = read_json(folder / CONFIG, NO_RUN)
    checkpoints.check_format(folder / CONFIG, config.pop(FORMAT_KEY, 1))
    return config


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return the JSON object in `path`, or raise with a hint if it is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OwnerwiseError(f"no {path.name} in {path.parent}: {hint}") from None
    except ValueError:
        raise OwnerwiseError(f"{path} is damaged: expected JSON") from None
    if not isinstance(content, dict):
        raise OwnerwiseError(f"{path} is damaged: expected a JSON object")
    return content


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a history file, without a partial last line from a killed process."""
    if not path.exists():
        return []
    # the last line break is followed by nothing, or by a partial line
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        raise OwnerwiseError(f"{path} is damaged: expected one JSON object per line") from None


def spent_steps(folder: Path) -> int:
    """Return the number of steps in the folder's ledger; 0 before it is written."""
    path = folder / checkpoints.LEDGER
    return int(read_json(path, NO_RUN)["steps_spent"]) if path.exists() else 0
