"""Budget classes of a plan: owners with one budget, or a range of budgets if there are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ownerwise.planning import BudgetClass, Plan


class Spent(NamedTuple):
    """What owners of a class have spent: at least, at most, and at most as a share of a budget."""

    low: float
    high: float
    share: float
    dearest: int  # position of the owner with the most


def spent(plan: Plan, classes: Sequence[BudgetClass], steps: int) -> list[Spent]:
    """Return what the owners of each class of a plan have spent after `steps`.

    Every owner is looked at: with deltas of their own, those between the strictest and the laxest
    may spend more than both.
    """
    epsilon = plan.epsilon(steps=steps)
    found = []
    for one in classes:
        of_class = epsilon[one.members]
        share = float((of_class / plan.targets[one.members]).max())
        dearest = int(one.members[of_class.argmax()])
        found.append(Spent(float(of_class.min()), float(of_class.max()), share, dearest))
    return found


def classes_of(plan: Plan) -> list[BudgetClass]:
    """Return at most 12 classes, the strictest first."""
    return sorted(plan.rows(), key=lambda row: (row.epsilon, row.delta))


def attacker_bound(epsilon: float, delta: float) -> float:
    """Return how often in 100 an attacker can be right at most about one record.

    The attacker knows everything but whether the record was used, which it would guess right 50
    times in 100. (epsilon, delta)-differential privacy bounds the sum of its two error rates from
    below by 2 (1 - delta) / (1 + e^epsilon).
    """
    return 100.0 * (1.0 - (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0))))


def attacker_words(bound: float) -> str:
    """Return a bound, rounded up: "57.5 in 100", "99.97 in 100"."""
    for digits in (1, 2, 3, 4):
        up = math.ceil(bound * 10**digits - 1e-9) / 10**digits
        if up < 100:
            return f"{up:.{digits}f} in 100"
    return "100 in 100"
