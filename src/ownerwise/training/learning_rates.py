"""Learning-rate schedules: a factor for each step of the plan, fixed before training.

A schedule is a public function of the step and never depends on losses: training losses are not
private, and validation losses would make the run depend on records that are not covered by any
guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ownerwise.registry import Registry, split
from ownerwise.training.values import is_number, within

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


SCHEDULES: Registry[Callable[..., Factor]] = Registry(
    "ownerwise.learning_rates",
    {"constant": constant, "linear": linear, "cosine": cosine, "step": step},
    kind="schedule",
    leading=1,
    extra=("warmup",),
)
"""Schedules by name: functions that map the number of steps, and options, to the factor."""

LearningRateSchedule = str | Mapping[str, Any] | Factor
"""A name; a name with options such as {"name": "cosine", "warmup": 100}; or a function."""


def factors(schedule: LearningRateSchedule, steps: int) -> Factor:
    """Return the factor for each step; it rises to 1 during the first `warmup` steps, if any."""
    if callable(schedule):
        return schedule
    name, options = split(schedule)
    warmup = options.pop("warmup", 0)
    after = SCHEDULES.make({"name": name, **options}, max(1, steps - warmup))
    return lambda step: (step + 1) / (warmup + 1) if step < warmup else after(step - warmup)


def schedule_problems(schedule: LearningRateSchedule, steps: int) -> list[str]:
    """Return all problems with a schedule for `steps` steps."""
    if callable(schedule):
        return _value_problems(schedule, steps)
    name, options = split(schedule)
    problems = [
        text
        for option in ("every", "warmup")
        if option in options
        for text in _whole_problems(f"schedule {name}: {option}", options[option], option, steps)
    ]
    problems += [
        f"schedule {name}: {option} is {options[option]!r}; expected a number from 0 to 1"
        for option in ("floor", "factor")
        if option in options and not within(0, 1).fits(options[option])
    ]
    problems = SCHEDULES.problems(schedule) + problems
    return problems or _value_problems(factors(schedule, steps), steps)


def _whole_problems(place: str, value: Any, option: str, steps: int) -> list[str]:
    least = 1 if option == "every" else 0
    if is_number(value) and value == int(value) and least <= value <= steps:
        return []
    return [
        f"{place} is {value!r}; expected a whole number from {least} to {steps}, the number of "
        "planned steps"
    ]


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
