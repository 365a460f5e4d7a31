"""Loggers, which write the lines of a run's history.

A line contains metrics on validation and test data (which are not covered by any guarantee), the
step, the learning rate and the time. A line contains nothing about the training records: no
training loss, no norms, no batch sizes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ownerwise.errors import Problems, require
from ownerwise.files import append_text, write_text
from ownerwise.registry import Registry
from ownerwise.runs import RUN_KEY, Run
from ownerwise.runs.settings import flat

Line = Mapping[str, Any]


class Logger(Protocol):
    """The methods that a Trainer calls on a logger."""

    def start(self, run: Run) -> None:
        """Start logging; `run.history` contains the earlier lines of a resumed run."""
        ...

    def log(self, line: Line) -> None:
        """Write one line."""
        ...

    def finish(self, run: Run) -> None:
        """Finish logging, whether the run completed or was stopped."""
        ...


class JsonLines:
    """Writes one JSON object per line. A killed process leaves at most one partial last line."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._run_id = ""

    def start(self, run: Run) -> None:
        """Write the history so far, and drop any other lines, which describe lost updates."""
        self._run_id = run.identity
        write_text(self._path, "".join(map(self._text, run.history)))

    def log(self, line: Line) -> None:
        """Append the line and flush it to disk."""
        append_text(self._path, self._text(line))

    def finish(self, run: Run) -> None:
        """Do nothing, because every line is already on disk."""

    def _text(self, line: Line) -> str:
        """Return a line as it is stored, with the run's identity."""
        return json.dumps({**line, RUN_KEY: self._run_id}) + "\n"


class TensorBoard:
    """Writes scalars for TensorBoard, to `folder` or to `tensorboard` in the run folder."""

    def __init__(self, folder: str | os.PathLike | None = None):
        require("tensorboard", "tensorboard", "the TensorBoard logger")
        self._folder = folder

    def start(self, run: Run) -> None:
        """Open the event file and purge events from lost updates."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if self._folder is None and run.folder else self._folder
        last = run.history[-1]["step"] if run.history else -1
        self._writer = SummaryWriter(folder, purge_step=last + 1)
        self._writer.add_text(
            "config", f"```json\n{json.dumps(run.config_without_ids, indent=2)}\n```"
        )

    def log(self, line: Line) -> None:
        """Write every number in the line."""
        for name, value in numbers(line):
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def finish(self, run: Run) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run. `options` are passed to `wandb.init` (project, entity, mode, ...)."""

    def __init__(self, project: str = "ownerwise", **options: Any):
        self._wandb = require("wandb", "wandb", "the Weights & Biases logger")
        self._options = {"project": project, **options}

    def start(self, run: Run) -> None:
        """Open the run; if it is resumed, log the lines from before."""
        self._run = self._wandb.init(name=run.name, config=run.config_without_ids, **self._options)
        for line in run.history:
            self.log(line)

    def log(self, line: Line) -> None:
        """Send every number in the line to Weights & Biases."""
        self._run.log(dict(numbers(line)), step=line["step"])

    def finish(self, run: Run) -> None:
        """Close the run."""
        self._run.finish()


class MLflow:
    """An MLflow run. `options` are passed to `mlflow.start_run` (tags, nested, ...).

    MLflow decides where the run is stored (`MLFLOW_TRACKING_URI`). As for the other loggers, it
    receives the settings without owners' ids and the numbers of the history, nothing else.
    """

    def __init__(self, **options: Any):
        self._mlflow = require("mlflow", "mlflow-skinny", "the MLflow logger")
        self._options = options

    def start(self, run: Run) -> None:
        """Open the run; if it is resumed, log the lines from before."""
        self._mlflow.start_run(run_name=run.name, **self._options)
        settings = flat(run.config_without_ids, separator="/")
        self._mlflow.log_params(
            {_mlflow_name(path): str(value)[:_LONGEST_PARAMETER] for path, value in settings}
        )
        for line in run.history:
            self.log(line)

    def log(self, line: Line) -> None:
        """Send every number in the line to MLflow."""
        values = {_mlflow_name(path): value for path, value in numbers(line)}
        self._mlflow.log_metrics(values, step=line["step"])

    def finish(self, run: Run) -> None:
        """State whether the run is private, and close it."""
        words = "yes" if run.private else f"NOT PRIVATE: {'; '.join(run.not_private)}"
        self._mlflow.set_tags({"private": words})
        self._mlflow.end_run()


_LONGEST_PARAMETER = 500
_FORBIDDEN_BY_MLFLOW = re.compile(r"[^A-Za-z0-9_\-./ ]")


def _mlflow_name(path: str) -> str:
    """Return a path with characters that MLflow refuses written as their code points."""
    return _FORBIDDEN_BY_MLFLOW.sub(lambda letter: f"U{ord(letter[0]):04X}", path)


LOGGERS: Registry[Callable[..., Logger]] = Registry(
    "ownerwise.loggers",
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow},
    kind="logger",
)
"""Loggers that can be selected by name. Other packages can add loggers through the entry-point
group `ownerwise.loggers`."""


def make_loggers(requested: Sequence[str | Logger], problems: Problems) -> list[Logger]:
    """Return the requested loggers, passed by name or as objects; add problems to the list."""
    loggers: list[Logger] = []
    for logger in requested:
        with problems.guard():
            loggers.append(LOGGERS.make(logger) if isinstance(logger, str) else logger)
    return loggers


def numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Yield every number in a line with its path, such as validation/groups/3/recall."""
    for path, value in flat(line, separator="/"):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
