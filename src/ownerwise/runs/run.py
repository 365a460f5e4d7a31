"""Runs: the results of training, kept in memory or in run folders.

A run folder contains `config.json` (the Trainer's settings and the format version), `plan.json`
with its arrays, `history.jsonl` (one line per evaluation on validation data), `account.db` (the
steps spent, see `account`), the two newest checkpoints (see `checkpoints`), `environment.json`,
and, after the run, `report.html` and `CARD.md`. These files contain no training records, and no
statistics computed from them without noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.evaluation import Predict, predicted_classes
from ownerwise.mechanisms import REGRESSION_LOSSES, WHOLE, RegressionLoss
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.repair import PullAdjustment, class_logits
from ownerwise.runs import export
from ownerwise.runs.prediction import NO_MODEL, class_outputs, model_inputs, remaining_shift
from ownerwise.runs.reading import (
    HISTORY,
    PLAN,
    disagreements,
    read_config,
    read_environment,
    read_history,
)
from ownerwise.step import checkpoints, read_account

REPORT = "report.html"
CARD = "CARD.md"
STEP_NOT_PRIVATE = "the run's account or checkpoint marks it as not private"


@dataclass(eq=False)
class Run:
    """A training run: its settings, its plan and its history. `Run.load(folder)` reads one.

    Attributes:
        config: the Trainer's settings, as JSON types.
        plan: the plan; without owners if the run was loaded from a folder.
        history: one entry per evaluation: "step", "updates", "seconds", "learning_rate",
            "validation" (None without validation data) and, in the last entry, "test" if there is
            test data. All metrics are measured on validation and test data, which are NOT covered
            by any guarantee.
        environment: software versions.
        steps_spent: number of steps accounted for.
        updates: number of updates applied to the model; fewer than `steps_spent` if a private run
            was resumed after a crash.
        folder: the run folder, or None for a run in memory.
        identity: random identifier of the run, the same in all its files; "" for a run in memory.
        problems: corruption that `Run.load` found in files that do not affect the epsilons.
        model: the trained model, for `predict`; None if the run was loaded without one.
        to_classes: function from the model's outputs to classes, as given to the Trainer.
    """

    config: dict[str, Any]
    plan: Plan = field(repr=False)
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    environment: dict[str, Any] = field(default_factory=dict, repr=False)
    steps_spent: int = 0
    updates: int = 0
    folder: Path | None = None
    identity: str = field(default="", repr=False)
    problems: list[str] = field(default_factory=list, repr=False)
    model: nn.Module | None = field(default=None, repr=False)
    to_classes: Predict = field(default=predicted_classes, repr=False)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config["name"]

    @property
    def label(self) -> str:
        """Method name in tables and legends; runs that differ only in their seed share it."""
        return self.config["label"]

    @property
    def split(self) -> str | None:
        """The split of the data (`Trainer(..., notes={"split": ...})`); None if not stated."""
        stated = self.config.get("split")
        return None if stated is None else str(stated)

    @property
    def seed(self) -> int | None:
        """The fixed seed, which makes the run NOT private; None for secret randomness."""
        return self.config["seed"]

    @property
    def private(self) -> bool:
        """Whether the guarantee holds (secret randomness, and nothing computed without noise)."""
        return not self.not_private

    @property
    def not_private(self) -> list[str]:
        """Reasons why the guarantee does not hold; empty if it does."""
        fixed = [] if self.seed is None else [f"fixed seed {self.seed}"]
        return fixed + list(self.config.get("not_private", ()))

    @property
    def config_without_ids(self) -> dict[str, Any]:
        """The config to show to others: without a table of owners' budgets, unless they are named.

        The config itself keeps the table as it was given, because a run is resumed with the same.
        """
        settings = self.config.get("settings", {})
        owners = settings.get("owners", {})
        if owners.get("named", True) or not isinstance(owners.get("epsilon"), dict):
            return self.config
        counted = {**owners, "epsilon": f"{len(owners['epsilon'])} budgets"}
        return {**self.config, "settings": {**settings, "owners": counted}}

    @property
    def group_budgets(self) -> dict[str, float]:
        """Epsilon for each validation group that has one."""
        return self.config["group_budgets"]

    def epsilon(self) -> np.ndarray:
        """Return the epsilon spent for each owner's records."""
        return self.plan.epsilon(steps=self.steps_spent)

    def owner_epsilon(self) -> np.ndarray:
        """Return the epsilon of each owner, all of their records together, in the plan's order.

        It is infinite if it is above 100, and NaN if no bound can be computed; see
        `Plan.owner_epsilon`.
        """
        return self.plan.owner_epsilon(steps=self.steps_spent)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's tensors from the newest checkpoint, for `model.load_state_dict`."""
        if self.folder is None or checkpoints.latest(self.folder) is None:
            where = "a run in memory" if self.folder is None else self.folder
            raise OwnerwiseError(f"{where} has no checkpoint: pass folder= to the Trainer")
        return checkpoints.state_dict(self.folder)

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, if the run was made from a configuration."""
        known = self.config.get("prediction")
        return None if known is None else known["classes"]

    @property
    def regression(self) -> RegressionLoss | None:
        """The loss of a run that predicts numbers; None for a classifier."""
        stored = self.config.get("regression")
        if stored is None:
            return None
        low, high = stored["range"]
        return RegressionLoss(low, high, REGRESSION_LOSSES[stored["loss"]])

    def predict(self, X: Any, repair: PullAdjustment | None = None) -> np.ndarray:
        """Return the predicted class of each record; its name, if the run knows the classes.

        For a regression (`RegressionLoss`), return the predicted numbers.
        Args:
            X: the model's inputs, an array or tensor [records, ...]. For a run that was made from a
                configuration with a table, also the path of a table with new records.
            repair: a correction of the outputs, from public label counts. What the run was trained
                with is not applied again.
        """
        if (loss := self.regression) is not None:
            return loss.numbers(self._outputs(X, repair)).cpu().numpy()
        classes = self.to_classes(self._outputs(X, repair)).cpu().numpy()
        return classes if self.classes is None else np.array(self.classes)[classes]

    def predict_proba(self, X: Any, repair: PullAdjustment | None = None) -> np.ndarray:
        """Return the class probabilities, [records, classes], of a classifier; see `predict`."""
        if self.regression is not None:
            raise OwnerwiseError("a regression predicts numbers, not classes: use run.predict(X)")
        return class_logits(self._outputs(X, repair)).softmax(dim=1).numpy()

    def _outputs(self, X: Any, repair: PullAdjustment | None) -> Tensor:
        shift = remaining_shift(self.config, self.plan, repair)
        inputs = self._preprocessed(X) if isinstance(X, str | PathLike) else X
        return class_outputs(self._trained_model(), inputs, shift)

    def _preprocessed(self, path: str | PathLike) -> np.ndarray:
        from ownerwise.config import read_inputs

        return read_inputs(self.config, path).inputs

    def _trained_model(self) -> nn.Module:
        """Return the model; one from a configuration is built again and loaded when needed."""
        if self.model is None:
            if "prediction" not in self.config or self.folder is None:
                raise OwnerwiseError(NO_MODEL)
            from ownerwise.config import build_again

            model = build_again(self.config)
            checkpoints.load_model(self.folder, model)
            self.model = model
        return self.model

    def export(
        self,
        folder: str | PathLike,
        X: Any = None,
        *,
        formats: Sequence[str] = ("torch", "onnx"),
        repair: PullAdjustment | None = None,
    ) -> list[Path]:
        """Write the model for use without ownerwise, with its privacy card, and return the paths.

        The files contain the model's outputs (logits, for a classifier) with all corrections, for
        any number of records: `model.pt2` (torch.export) and `model.onnx`. `model.json` names the
        inputs and the classes, in order.

        Args:
            folder: the folder to write to.
            X: a few of the model's inputs, of which only the shape and dtype are used; not needed
                for a run of `ownerwise train` whose inputs are numbers.
            formats: "torch", "onnx" or both; ONNX needs `pip install 'ownerwise[export]'`.
            repair: see `predict`.
        """
        shift = remaining_shift(self.config, self.plan, repair)
        example, model = export.example_of(self.config, X), self._trained_model()
        known = self.config.get("prediction") or {}
        described = {
            "inputs": list(known.get("columns") or []),
            "classes": list(known.get("classes") or []),
            "outputs": "the model's outputs, one row per record; for a classifier, logits",
            "private": self.private,
        }
        rows = model_inputs(model, example)
        written = export.export_model(model, rows, shift, Path(folder), formats, described)
        self.card(Path(folder) / CARD)
        return [*written, Path(folder) / CARD]

    def individual_spends(self, *, not_private: bool = False) -> np.ndarray:
        """NOT PRIVATE: return the share of its budget that each record has spent, float64.

        Only for runs with individual accounting, and only with `not_private=True`: the shares
        follow from the records' own gradients. They are read from the newest checkpoint, in the
        order of the data (of `plan.owners.ids` if owners are the unit).
        """
        if not_private is not True:
            raise OwnerwiseError(
                "what each record has spent follows from its own gradients, without noise: pass "
                "not_private=True to see it, and do not publish it"
            )
        if self.folder is None:
            raise OwnerwiseError("a run without a folder does not store what records have spent")
        return checkpoints.individual_spends(self.folder) / WHOLE

    def report(self, path: str | PathLike, *others: Run) -> None:
        """Write an HTML report on this run, compared with any other runs that are passed.

        If several processes train together, the first one writes it.
        """
        from ownerwise.report import write_report

        if Processes.here().first:
            write_report([self, *others], path)

    def card(self, path: str | PathLike) -> None:
        """Write this run's privacy card; see `report`."""
        from ownerwise.report import write_card

        if Processes.here().first:
            write_card(self, path)

    @classmethod
    def load(cls, folder: str | PathLike, model: nn.Module | None = None) -> Self:
        """Read a run folder; the run may be finished, in progress or stopped.

        Corrupted history and environment files are reported with a warning and in `problems`.

        Args:
            folder: the run folder.
            model: a network with the architecture that was trained, for `predict`; the newest
                checkpoint is loaded into it. Not needed for a run of `ownerwise train`.

        Raises:
            OwnerwiseError: if the number of spent steps is uncertain, or another file that the run
                needs is corrupted or belongs to another run.
        """
        folder = Path(folder)
        problems, lines = Problems(), Problems()
        config, identity = read_config(folder)
        plan = Plan.load(folder / PLAN)
        header = checkpoints.newest_header(folder, problems)
        environment = read_environment(folder, problems)
        balance = read_account(folder)  # read last: an active run updates it before the checkpoint
        known = identity or (balance.run if balance else "")
        history = read_history(folder / HISTORY, known, lines)
        if history and balance is not None and history[-1]["step"] > balance.spent:
            balance = read_account(folder)  # an active run has continued in the meantime
        refused = disagreements(folder, plan.hash, balance, header, config, identity, history)
        if refused or balance is None:
            raise OwnerwiseError(refused)
        problems += lines
        problems.warn()
        says_private = balance.private is not False
        says_private &= header is None or header.get("private", config["seed"] is None)
        if not says_private and config["seed"] is None and not config.get("not_private"):
            config["not_private"] = [STEP_NOT_PRIVATE]
        if model is not None:
            checkpoints.load_model(folder, model)
        return cls(
            config=config,
            plan=plan,
            history=history,
            environment=environment,
            steps_spent=min(balance.spent, plan.steps),
            updates=0 if header is None else header["updates"],
            folder=folder,
            identity=balance.run,
            problems=list(problems),
            model=model,
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
