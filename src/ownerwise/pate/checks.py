"""Whether the values of a PATE plan fit together, before any cost is computed from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def plan_problems(plan: Any) -> list[str]:
    """Return the problems with the values of a plan; the budgets are another matter."""
    problems = _shape_problems(plan)
    if problems:
        return problems
    grid = plan.grid
    if not (plan.weights / grid == np.round(plan.weights / grid)).all() or (plan.weights < 0).any():
        problems.append("the weights are not multiples of the grid, so counts would be rounded")
    if (plan.test_std is None) != (plan.threshold is None):
        problems.append("a threshold without noise on the test, or the reverse")
    if not 1 <= plan.answers <= plan.questions:
        problems.append("expected at least 1 and at most as many answers as questions")
    if plan.owners is not None and not (
        np.array_equal(plan.owners.epsilon, plan.targets)
        and np.array_equal(plan.owners.delta, plan.deltas)
    ):
        problems.append("the plan and its owners have different budgets")
    return problems


def _shape_problems(plan: Any) -> list[str]:
    """Return the problems with values from which no cost can be computed."""
    problems = []
    if not all(isinstance(value, int | np.integer) for value in (plan.questions, plan.answers)):
        problems.append("questions and answers: expected whole numbers")
    if plan.unit not in ("record", "owner"):
        problems.append(f"unit is {plan.unit!r}; expected 'record' or 'owner'")
    stds = [plan.answer_std, *([] if plan.test_std is None else [plan.test_std])]
    if not all(0 < std < math.inf for std in stds):
        problems.append("expected finite noise above 0")
    if not len(plan.first) == len(plan.count) == len(plan.weights) == len(plan.copies) > 0:
        problems.append("first, count, weights and copies: expected one number per budget class")
    elif not ((plan.first >= 0) & (plan.copies >= 1) & (plan.copies <= plan.count)).all():
        problems.append("expected 1 to `count` teachers per record in each budget class")
    elif not problems and any(
        (plan.teacher_weights[first : first + count] != weight).any()
        for first, count, weight in zip(plan.first, plan.count, plan.weights, strict=True)
    ):
        problems.append("teachers of a budget class have another weight than the one it pays for")
    return problems
