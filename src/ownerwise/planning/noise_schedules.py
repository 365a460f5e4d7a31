"""Noise schedules by name: how the noise decays over the steps of a plan.

A schedule is piecewise constant. It multiplies the noise of every piece of the run (an epoch, for
example) by a factor, which is 1 in the first piece. The pieces become the segments of an
`accounting.Schedule`; each is accounted for with its own noise, never with the mean. Planning then
finds the noise of the first piece.

References: Yu, Liu, Pu, Gursoy, Truex (2019), "Differentially Private Model Publishing for Deep
Learning", for time, exponential, step and polynomial decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ownerwise.accounting import Schedule
from ownerwise.registry import Registry, split

Segments = tuple[tuple[int, float], ...]
"""Consecutive segments, each a pair (number of steps, noise factor)."""

PieceFactor = Callable[[int], float]
"""Noise factor of the piece with the given number, counted from 0."""


def constant(pieces: int) -> PieceFactor:
    """Return the factor 1 for every piece."""
    return lambda piece: 1.0


def exponential(pieces: int, *, rate: float = 0.05) -> PieceFactor:
    """Return the factor exp(-rate * piece)."""
    return lambda piece: math.exp(-rate * piece)


def time(pieces: int, *, rate: float = 0.1) -> PieceFactor:
    """Return the factor 1 / (1 + rate * piece)."""
    return lambda piece: 1.0 / (1.0 + rate * piece)


def step(pieces: int, *, factor: float = 0.7) -> PieceFactor:
    """Return `factor` to the power of the piece number; by default, there are three pieces."""
    return lambda piece: factor**piece


def polynomial(pieces: int, *, floor: float = 0.5, power: float = 1.0) -> PieceFactor:
    """Return a factor that falls from 1 to `floor` as a power of the fraction of pieces left."""
    return lambda piece: floor + (1.0 - floor) * (1.0 - piece / pieces) ** power


SCHEDULES: Registry[Callable[..., PieceFactor]] = Registry(
    "ownerwise.noise_schedules",
    {
        "constant": constant,
        "exponential": exponential,
        "time": time,
        "step": step,
        "polynomial": polynomial,
    },
    kind="noise_schedule",
    leading=1,
    extra=("every",),
)
"""Schedules by name: functions that map the number of pieces, and options, to the factors."""

NoiseSchedule = str | Mapping[str, Any] | Iterable[tuple[int, float]]
"""A name; a name with options such as {"name": "exponential", "rate": 0.02, "every": 117}, where
`every` is the number of steps in a piece; or the segments themselves."""

PIECES = 10
"""Number of pieces if `every` is not given. Accounting for one piece takes as long as accounting
for a whole run."""
_STEP_PIECES = 3
_AT_MOST_ONE = ("factor", "floor")


def segments(schedule: NoiseSchedule, steps: int | None) -> Segments:
    """Return the segments of a schedule for `steps` steps; given segments are returned unchanged.

    The schedule must be valid, as checked by `schedule_problems`.
    """
    if not isinstance(schedule, str | Mapping):
        return tuple((count, factor) for count, factor in schedule)
    assert steps is not None
    name, options = split(schedule)
    every = options.pop("every", _default_length(name, steps))
    pieces = -(-steps // int(every))
    factor = SCHEDULES.make({"name": name, **options}, pieces)
    lengths = [min(int(every), steps - piece * int(every)) for piece in range(pieces)]
    return tuple((length, factor(piece)) for piece, length in enumerate(lengths))


def schedule_problems(schedule: NoiseSchedule, steps: int | None) -> list[str]:
    """Return all problems with a schedule; `steps` is None if unknown."""
    if not isinstance(schedule, str | Mapping):
        return _segment_problems(schedule, steps)
    name, options = split(schedule)
    problems = SCHEDULES.problems(schedule)
    if name not in SCHEDULES:
        return problems
    if steps is None:
        problems.append(f"noise_schedule {name!r} needs steps=, which it divides into pieces")
    for option, value in options.items():
        where = f"noise_schedule {name}: {option} is {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{where}; expected a number")
        elif option == "every":
            if value != int(value) or not 1 <= value <= (math.inf if steps is None else steps):
                problems.append(f"{where}; expected a whole number from 1 to the number of steps")
        elif not 0 < value < math.inf or (option in _AT_MOST_ONE and value > 1):
            most = " and at most 1" if option in _AT_MOST_ONE else ""
            problems.append(f"{where}; expected a number above 0{most}")
    if problems or steps is None or steps < 1 or steps != int(steps):
        return problems  # the plan reports bad steps
    least = min(factor for _, factor in segments(schedule, steps))
    if least < 1e-3:
        return [
            f"noise_schedule {name} falls to {least:g} of the initial noise; expected at least "
            "0.001"
        ]
    return []


def _segment_problems(pieces: Iterable[tuple[int, float]], steps: int | None) -> list[str]:
    try:
        total = Schedule(tuple(pieces)).steps
    except (TypeError, ValueError) as error:
        return [f"noise_schedule {pieces!r}: expected a name, or segments ({error})"]
    if steps in (None, total):
        return []
    return [f"noise_schedule has {total} steps; expected steps={steps}"]


def _default_length(name: str, steps: int) -> int:
    return -(-steps // (_STEP_PIECES if name == "step" else PIECES))
