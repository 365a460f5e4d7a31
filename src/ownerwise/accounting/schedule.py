"""The number of steps in a run, and the noise at each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Consecutive segments, given as pairs (number of steps, factor for the noise std).

    `Schedule.constant(2000)` describes an ordinary run. A schedule with decaying noise has several
    segments. Each is accounted for with its own noise, never with the mean of the multipliers.
    """

    segments: tuple[tuple[int, float], ...]

    def __post_init__(self):
        clean = tuple((int(count), float(factor)) for count, factor in self.segments)
        for (count, factor), (given, _) in zip(clean, self.segments, strict=True):
            if count != given or count < 0 or not 0 < factor < float("inf"):
                raise ValueError(
                    f"schedule segment ({given!r}, {factor!r}): expected (whole number of steps "
                    ">= 0, positive finite noise factor)"
                )
        object.__setattr__(self, "segments", clean)

    @classmethod
    def constant(cls, steps: int) -> Schedule:
        """Return a schedule of `steps` steps with constant noise."""
        return cls(((steps, 1.0),))

    @classmethod
    def of(cls, steps: int | Schedule | Iterable[tuple[int, float]]) -> Schedule:
        """Return `steps` as a schedule; it may be a number of steps, segments or a schedule."""
        if isinstance(steps, Schedule):
            return steps
        return cls.constant(steps) if isinstance(steps, int) else cls(tuple(steps))

    @property
    def steps(self) -> int:
        """Total number of steps in all segments."""
        return sum(count for count, _ in self.segments)

    def first(self, steps: int) -> Schedule:
        """Return the schedule of the first `steps` steps."""
        if not 0 <= steps <= self.steps:
            raise ValueError(f"steps={steps}: expected 0 to {self.steps} planned steps")
        left, kept = steps, []
        for count, factor in self.segments:
            kept.append((min(count, left), factor))
            left -= kept[-1][0]
        return Schedule(tuple(segment for segment in kept if segment[0]) or ((0, 1.0),))

    def factor_at(self, step: int) -> float:
        """Return the noise factor of step number `step`, counted from 0."""
        end = 0
        for count, factor in self.segments:
            end += count
            if step < end:
                return factor
        raise ValueError(f"step {step}: expected 0 to {self.steps - 1} (the planned steps)")
