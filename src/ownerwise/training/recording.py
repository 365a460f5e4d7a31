"""Write checkpoints and history lines during training, for steps that are already counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from ownerwise.errors import printable
from ownerwise.evaluation import Evaluation
from ownerwise.mechanisms import Loss
from ownerwise.processes import Processes
from ownerwise.runs import STEP_NOT_PRIVATE, Run
from ownerwise.step import PrivateStep
from ownerwise.training.averaging import Averaging
from ownerwise.training.learning_rates import Factor
from ownerwise.training.loggers import Logger


class Recorder:
    """Writes the checkpoints and history lines due before the first step or after any step.

    The first of several processes evaluates the model and writes for all.

    If both are due, the checkpoint is written first, so a crash in between cannot leave a line
    without its model. Every step was counted in the account before it was taken.

    Args:
        run: the run to which history lines are added.
        step: the private step, with the model and the number of steps spent.
        loss: the loss, for evaluations.
        learning_rate: the learning rate as a function of the step.
        validation, test: validation data, evaluated for every line, and test data, evaluated at the
            end.
        loggers: the loggers that receive the lines.
        average: average of the parameters, which is evaluated in their place and is the run's
            final result.
    """

    def __init__(
        self,
        run: Run,
        step: PrivateStep,
        loss: Loss,
        learning_rate: Factor,
        validation: Evaluation | None,
        test: Evaluation | None,
        loggers: Sequence[Logger],
        average: Averaging | None = None,
    ):
        self._run = run
        self._step = step
        self._loss = loss
        self.learning_rate = learning_rate
        self._validation = validation
        self._test = test
        self._loggers = loggers
        self._average = average
        self._processes = Processes.here()
        self._averaged = step.updates
        self._before: dict[str, Any] | None = None  # metrics before calibration
        self._seconds = run.history[-1]["seconds"] if run.history else 0.0
        self._since = time.perf_counter()

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.start(self._run)
        return self

    def __exit__(self, *error: object) -> None:
        self._note_state()  # a step that failed is spent too
        for logger in self._loggers:
            logger.finish(self._run)

    @property
    def summary(self) -> str:
        """A short summary of the last evaluation, for a progress bar."""
        metrics = self._run.history[-1]["validation"] if self._run.history else None
        if metrics is None:
            return ""
        overall, of_group = ("rmse", "rmse") if "rmse" in metrics else ("accuracy", "recall")
        words, worst = f"{overall} {metrics[overall]:.3g}", metrics["worst_group"]
        if worst is not None:
            words += f", worst {printable(worst['name'])} {worst[of_group]:.3g}"
        return words

    def record(self) -> bool:
        """Write a checkpoint and a line if they are due; return whether a line was written."""
        run = self._run
        self._update_average()
        self._seconds += time.perf_counter() - self._since
        self._note_state()
        if self._due("checkpoint_every"):
            self.checkpoint()
        unfinished = self._is_last() and self._step.to_calibrate  # the last line comes later
        written = self._due("evaluate_every") and not self._has_line() and not unfinished
        if written:
            with self._averaged_model():
                line = self._processes.on_first(self._line)
            run.history.append(line)
            self._processes.together(lambda: [logger.log(line) for logger in self._loggers])
        self._since = time.perf_counter()  # do not count evaluation as training time
        return written

    def _note_state(self) -> None:
        """Record in the run how many steps were spent and whether it is still private."""
        run, step = self._run, self._step
        run.steps_spent, run.updates = step.steps_spent, step.updates
        if run.private and not step.private:
            run.config["not_private"] = [STEP_NOT_PRIVATE]

    def checkpoint(self) -> None:
        """Write a checkpoint if the run has a folder."""
        if self._run.folder is not None:
            self._step.save(self._run.folder, stays_open=True)

    def _update_average(self) -> None:
        """Include new updates in the average, which replaces the parameters after the last step."""
        if self._average is None:
            return
        if self._step.updates > self._averaged:
            self._averaged = self._step.updates
            self._average.update(self._step.optimizer, self._averaged)
        if self._is_last():
            with self._step.data_free_changes():
                self._average.finish(self._step.optimizer)
            self._average = None  # the parameters are the average from now on

    @contextmanager
    def _averaged_model(self) -> Iterator[None]:
        """Evaluate the average, if there is one, in place of the parameters."""
        if self._average is None:
            yield
        else:
            with self._step.data_free_changes(), self._average.applied(self._step.optimizer):
                yield

    def evaluate_before_calibration(self) -> None:
        """Evaluate the model on validation data, for comparison with the calibrated one."""
        if self._validation is not None:
            evaluation, model = self._validation, self._step.model
            self._before = self._processes.on_first(lambda: evaluation(model, self._loss))

    def _is_last(self) -> bool:
        return self._step.steps_spent == self._run.plan.steps

    def _due(self, setting: str) -> bool:
        return self._step.steps_spent % self._run.config[setting] == 0 or self._is_last()

    def _has_line(self) -> bool:
        return bool(self._run.history) and self._run.history[-1]["step"] == self._step.steps_spent

    def _line(self) -> dict[str, Any]:
        spent, model = self._step.steps_spent, self._step.model
        line: dict[str, Any] = {
            "step": spent,
            "updates": self._step.updates,
            "seconds": round(self._seconds, 4),
            "learning_rate": self.learning_rate(max(spent - 1, 0)),
            "validation": None,
        }
        if self._step.steering is not None and (released := self._step.steering.record()):
            line["steering"] = released
        last = self._is_last()
        if self._validation is not None:
            line["validation"] = self._validation(model, self._loss, details=last)
        if self._step.release is not None:
            line["constraints"] = self._step.release.record()
        if not spent and self._step.statistics is not None:
            line["statistics"] = self._step.statistics.record()
        if last and self._step.calibration is not None:
            line["calibration"] = {**self._step.calibration.record(), "before": self._before}
        if self._test is not None and last:
            line["test"] = self._test(model, self._loss, details=True)
        return line
