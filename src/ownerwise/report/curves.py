"""Curves over training steps, with a band over seeds, downsampled for display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.runs import Run

MOST_POINTS = 300


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation (None for a single run) over seeds at each step."""

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray | None

    @classmethod
    def over_seeds(cls, steps: np.ndarray, values: np.ndarray) -> Curve:
        """Return the curve of the values [seeds, steps] at these steps."""
        deviation = values.std(axis=0, ddof=1) if len(values) > 1 else None
        return cls(steps, values.mean(axis=0), deviation)

    def thinned(self, most: int = MOST_POINTS) -> Curve:
        """Return at most `most` points, including the first and the last."""
        if len(self.steps) <= most:
            return self
        kept = np.unique(np.linspace(0, len(self.steps) - 1, most).round().astype(int))
        deviation = None if self.deviation is None else self.deviation[kept]
        return Curve(self.steps[kept], self.mean[kept], deviation)


def curve(runs: Sequence[Run], value: Callable[[dict[str, Any]], float | None]) -> Curve | None:
    """Return the curve of `value(validation)` over the runs of one method, or None.

    The curve uses the steps of the first run that lie within the range of all runs. Runs that were
    evaluated at other steps are interpolated; the values of the others are used as they are.
    """
    tracks = [_track(run, value) for run in runs]
    if any(len(steps) == 0 for steps, _ in tracks):
        return None
    steps, _ = tracks[0]
    start = max(track_steps[0] for track_steps, _ in tracks)
    end = min(track_steps[-1] for track_steps, _ in tracks)
    steps = steps[(start <= steps) & (steps <= end)]
    if not len(steps):
        return None
    values = np.array([np.interp(steps, *track) for track in tracks])
    return Curve.over_seeds(steps, values)


def _track(
    run: Run, value: Callable[[dict[str, Any]], float | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values, using the last line if a resumed run repeated a step."""
    lines = [line for line in run.history if line.get("validation")]
    by_step = {line["step"]: value(line["validation"]) for line in lines}
    steps = sorted(by_step)
    values = [np.nan if by_step[step] is None else by_step[step] for step in steps]
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
