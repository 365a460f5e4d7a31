"""Progress of several runs: how many are done, and roughly how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ownerwise.wording import duration
from ownerwise_reproduction.trials import Report

_QUIET_SECONDS = 30  # seconds between lines if no run finishes


class Progress:
    """Print progress to standard error as plain lines, for terminals and files alike.

    Args:
        names: names of the pending runs, keyed by the paths of their results.
        steps: number of steps in each run.
        total: number of runs, including finished ones.
        quiet: print nothing.

    Attributes:
        failures: the problems that caused runs to fail.
    """

    def __init__(
        self,
        names: Mapping[Path, str],
        steps: Mapping[Path, int],
        total: int,
        quiet: bool = False,
    ):
        self._names = names
        self._steps = steps
        self._taken = dict.fromkeys(steps, 0)
        self._skipped: dict[Path, int] = {}
        self._total = total
        self._done = total - len(steps)
        self._quiet = quiet
        self.failures: list[str] = []
        self._began = self._printed = time.monotonic()
        if self._done:
            self._print(f"{self._done} of {total} runs are already done")

    def reporter(self, run: Path) -> Report:
        """Return the function to call with the number of steps that a run has taken."""
        return lambda steps: self.advanced(run, steps)

    def advanced(self, run: Path, steps: int) -> None:
        """Record the number of steps that a run has taken."""
        self._skipped.setdefault(run, steps)  # steps that an earlier process took
        self._taken[run] = steps
        if steps and time.monotonic() - self._printed > _QUIET_SECONDS:
            self._print(f"{self._names[run]}: step {steps} of {self._steps[run]}; {self._left()}")

    def finished(self, run: Path, result: Mapping[str, Any]) -> None:
        """Record that a run has finished."""
        self._taken[run] = self._steps[run]
        self._done += 1
        final = result["final"]
        self._print(
            f"{self._done} of {self._total}: {self._names[run]}, accuracy {final['accuracy']:.4f}, "
            f"worst group {final['worst_group']['recall']:.4f}, {result['wall_seconds']:.0f} s; "
            f"{self._left()}"
        )

    def failed(self, run: Path, problems: Sequence[str]) -> None:
        """Record that a run has failed."""
        self._taken[run] = self._steps[run]
        self._done += 1
        self.failures += [f"{self._names[run]}: {problem}" for problem in problems]
        self._print(f"{self._done} of {self._total}: {self._names[run]} FAILED; {self._left()}")

    def _left(self) -> str:
        """Return an estimate of the remaining time, based on the steps taken so far."""
        left = sum(self._steps.values()) - sum(self._taken.values())
        if not left:
            return "nothing left"
        taken = sum(self._taken.values()) - sum(self._skipped.values())
        if taken <= 0:
            return "time left unknown"
        seconds = (time.monotonic() - self._began) * left / taken
        return f"about {duration(seconds)} left"

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)
