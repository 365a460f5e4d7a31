"""What leaves a run while it trains: checkpoints and lines of history, the ledger always first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

from ownerwise.evaluation import (
    Evaluation,
)
from ownerwise.mechanisms import (
    Loss,
)
from ownerwise.mechanisms.constraints import RateConstraints
from ownerwise.runs import (
    Run,
    drop_older_checkpoints,
)
from ownerwise.step import (
    PrivateStep,
    checkpoints,
)
from ownerwise.training.averaging import Averaging
from ownerwise.training.learning_rates import Factor
from ownerwise.training.loggers import Logger


class Recorder:
    """Writes a checkpoint and a line where they are due: before the first step and after each.

    The checkpoint comes first, so that no line is kept whose model is lost. Every line, and every
    checkpoint, counts its steps in the ledger before it is written.

    Args:
        run: the run, whose history grows.
        step: the private step, with model and position.
        loss: the loss, for evaluations.
        rate: the learning rate of every step.
        validation, test: what to evaluate, and at the end.
        loggers: where lines go.
        average: of the models on the way: evaluated instead, and in the end the result.
    """

    def __init__(
        self,
        run: Run,
        step: PrivateStep,
        loss: Loss,
        rate: Factor,
        validation: Evaluation | None,
        test: Evaluation | None,
        loggers: Sequence[Logger],
        average: Averaging | None = None,
    ):
        self._run = run
        self._step = step
        self._loss = loss
        self.rate = rate
        self._validation = validation
        self._test = test
        self._loggers = loggers
        self._average = average
        self._averaged = step.updates
        self._seconds = run.history[-1]["seconds"] if run.history else 0.0
        self._since = time.perf_counter()

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.start(self._run)
        return self

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            logger.finish(self._run)

    @property
    def summary(self) -> str:
        """The last evaluation in a few words, for a progress bar."""
        found = self._run.history[-1]["validation"] if self._run.history else None
        if found is None:
            return ""
        worst = found["worst_group"]
        return f"accuracy {found['accuracy']:.3f}, worst {worst['name']} {worst['recall']:.3f}"

    def record(self) -> bool:
        """Let leave what is due; return whether a line was written."""
        run, step = self._run, self._step
        self._follow()
        self._seconds += time.perf_counter() - self._since
        run.steps_spent, run.updates = step.steps_spent, step.updates
        if self._due("checkpoint_every"):
            self.checkpoint()
        written = self._due("evaluate_every") and not self._has_line()
        if written:
            if run.folder is not None:
                checkpoints.record_steps(run.folder, run.plan, step.steps_spent)
            average = self._average
            with nullcontext() if average is None else average.applied(step.optimizer):
                line = self._line()
            run.history.append(line)
            for logger in self._loggers:
                logger.log(line)
        self._since = time.perf_counter()  # evaluation is no training time
        return written

    def checkpoint(self) -> None:
        """Write a checkpoint, if the run has a folder; older ones go."""
        if self._run.folder is not None:
            self._step.save(self._run.folder, count_steps=False)
            drop_older_checkpoints(self._run.folder)

    def _follow(self) -> None:
        """Take a new update into the average; after the last step the average is the model."""
        if self._average is None:
            return
        if self._step.updates > self._averaged:
            self._averaged = self._step.updates
            self._average.update(self._step.optimizer, self._averaged)
        if self._step.steps_spent == self._run.plan.steps:
            self._average.finish(self._step.optimizer)

    def _due(self, setting: str) -> bool:
        spent = self._step.steps_spent
        return spent % self._run.config[setting] == 0 or spent == self._run.plan.steps

    def _has_line(self) -> bool:
        return bool(self._run.history) and self._run.history[-1]["step"] == self._step.steps_spent

    def _line(self) -> dict[str, Any]:
        spent, model = self._step.steps_spent, self._step.model
        line: dict[str, Any] = {
            "step": spent,
            "updates": self._step.updates,
            "seconds": round(self._seconds, 2),
            "learning_rate": self.rate(max(spent - 1, 0)),
            "validation": self._validation(model, self._loss) if self._validation else None,
        }
        if isinstance(self._step.release, RateConstraints):
            line["constraints"] = self._step.release.record()
        if self._test is not None and spent == self._run.plan.steps:
            line["test"] = self._test(model, self._loss)
        return line
