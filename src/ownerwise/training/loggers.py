"""Loggers: where the lines of a run's history go besides memory.

A line is made of validation and test data (no guarantee covers these), the step, the learning rate
and the time. Nothing of the training records is in it: no training loss, no norms, no batch sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ownerwise.errors import OwnerwiseError, require
from ownerwise.files import write_text
from ownerwise.runs import (
    Run,
)

Line = Mapping[str, Any]


class Logger(Protocol):
    """What a Trainer asks of a logger."""

    def start(self, run: Run) -> None:
        """Begin; `run.history` holds the lines so far if the run was resumed."""
        ...

    def log(self, line: Line) -> None:
        """Take one line."""
        ...

    def finish(self, run: Run) -> None:
        """End, whether the run came to its end or was stopped."""
        ...


class JsonLines:
    """One JSON object a line. A killed process leaves whole lines and at most half a last one."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)

    def start(self, run: Run) -> None:
        """Write the lines so far: whatever else the file held is of updates that were lost."""
        text = "".join(json.dumps(line) + "\n" for line in run.history)
        write_text(self._path, text)

    def log(self, line: Line) -> None:
        """Append the line, through to the disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, run: Run) -> None:
        """Nothing is left to do."""


class TensorBoard:
    """Scalars for TensorBoard, in `folder` or in the run folder's `tensorboard`."""

    def __init__(self, folder: str | os.PathLike | None = None):
        require("tensorboard", "tensorboard", "the TensorBoard logger")
        self._folder = folder

    def start(self, run: Run) -> None:
        """Open the event file; events of lost updates are marked as such."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if self._folder is None and run.folder else self._folder
        last = run.history[-1]["step"] if run.history else -1
        self._writer = SummaryWriter(folder, purge_step=last + 1)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```")

    def log(self, line: Line) -> None:
        """Write every number of the line."""
        for name, value in numbers(line):
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def finish(self, run: Run) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases. `options` go to `wandb.init` (project, entity, mode, ...)."""

    def __init__(self, project: str = "ownerwise", **options: Any):
        self._wandb = require("wandb", "wandb", "the Weights & Biases logger")
        self._options = {"project": project, **options}

    def start(self, run: Run) -> None:
        """Open the run; it begins with the lines so far, if it was resumed."""
        self._run = self._wandb.init(name=run.name, config=run.config, **self._options)
        for line in run.history:
            self.log(line)

    def log(self, line: Line) -> None:
        """Send every number of the line."""
        self._run.log(dict(numbers(line)), step=line["step"])

    def finish(self, run: Run) -> None:
        """Close the run."""
        self._run.finish()


LOGGERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Loggers that can be asked for by name."""


def make_loggers(asked: Sequence[str | Logger], problems: list[str]) -> list[Logger]:
    """Return the loggers that were asked for, by name or as objects; add what is wrong."""
    made: list[Logger] = []
    for logger in asked:
        if not isinstance(logger, str):
            made.append(logger)
        elif logger not in LOGGERS:
            problems.append(
                f"logger {logger!r}: expected one of {', '.join(LOGGERS)}, or an object"
            )
        else:
            try:
                made.append(LOGGERS[logger]())
            except OwnerwiseError as error:
                problems += error.problems
    return made


def numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a line with its path, such as validation/groups/3/recall."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value
