"""Learning-rate schedules: a factor for each step of the plan, fixed before training.

A schedule is a public function of the step and never depends on losses: training losses are not
private, and validation losses would make the run depend on records that are not covered by any
guarantee.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

Factor = Callable[[int], float]
"""factor(step) multiplies the learning rate at step `step`, counting from 0."""


def constant(steps: int) -> Factor:
    """Return the constant factor 1."""
    return lambda step: 1.0


def linear(steps: int, *, floor: float = 0.0) -> Factor:
    """Return a linear decay from 1 to `floor`."""
    return lambda step: 1.0 + (floor - 1.0) * step / steps


def cosine(steps: int, *, floor: float = 0.0) -> Factor:
    """Return a cosine decay from 1 to `floor`."""
    return lambda step: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * step / steps))


def step(steps: int, *, every: int | None = None, factor: float = 0.1) -> Factor:
    """Return a step decay: multiply by `factor` every `every` steps (default: `steps` / 3)."""
    length = max(1, steps // 3) if every is None else every
    return lambda step: factor ** (step // length)


SCHEDULES: Mapping[str, Callable[..., Factor]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "step": step,
}

LearningRateSchedule = str | Mapping[str, Any] | Factor
"""A name; a name with options such as {"name": "cosine", "warmup": 100}; or a function."""


def factors(schedule: LearningRateSchedule, steps: int) -> Factor:
    """Return the factor for each step; it rises to 1 during the first `warmup` steps, if any."""
    if callable(schedule):
        return schedule
    options: dict[str, Any] = {"name": schedule} if isinstance(schedule, str) else dict(schedule)
    name, warmup = options.pop("name"), options.pop("warmup", 0)
    after = SCHEDULES[name](max(1, steps - warmup), **options)
    return lambda step: (step + 1) / (warmup + 1) if step < warmup else after(step - warmup)


def schedule_problems(schedule: LearningRateSchedule, steps: int) -> list[str]:
    """Return all problems with a schedule for `steps` steps."""
    if callable(schedule):
        return _value_problems(schedule, steps)
    options: dict[str, Any] = (
        dict(schedule) if isinstance(schedule, Mapping) else {"name": schedule}
    )
    name = options.pop("name", None)
    if name not in SCHEDULES:
        return [
            f"schedule {name!r}: expected one of {', '.join(SCHEDULES)}, or a function from the "
            "step to a factor"
        ]
    problems = []
    known = [*inspect.signature(SCHEDULES[name]).parameters][1:]
    for option, value in options.items():
        if option not in (*known, "warmup"):
            allowed = ", ".join([*known, "warmup"])
            problems.append(f"schedule {name} has no option {option!r}; expected {allowed}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"schedule {name}: {option} is {value!r}; expected a number")
        elif option in ("every", "warmup"):
            least = 1 if option == "every" else 0
            if value != int(value) or not least <= value <= steps:
                problems.append(
                    f"schedule {name}: {option} is {value}; expected a whole number from {least} "
                    f"to {steps}, the number of planned steps"
                )
        elif not 0 <= value <= 1:
            problems.append(f"schedule {name}: {option} is {value}; expected a number from 0 to 1")
    return problems or _value_problems(factors(schedule, steps), steps)


def _value_problems(factor: Factor, steps: int) -> list[str]:
    """Return any problem with the factors at a few steps, including the first and the last."""
    for step in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
        try:
            value = float(factor(step))
        except Exception as error:
            return [f"the schedule fails at step {step}: {error}"]
        if not 0 <= value < math.inf:
            return [f"the schedule returns {value} at step {step}; expected a number of at least 0"]
    return []
