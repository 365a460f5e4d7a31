"""How much the owners in a budget class have spent, and how their guarantee limits an attacker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ownerwise.planning import BudgetClass, Plan


class Spent(NamedTuple):
    """The epsilon that the owners in a class have spent."""

    low: float
    high: float
    share: float  # the largest share of their own budget that an owner has spent
    highest_owner: int  # position of the owner who has spent the most


def spent(plan: Plan, classes: Sequence[BudgetClass], steps: int) -> list[Spent]:
    """Return the epsilon that the owners in each of a plan's classes have spent by step `steps`.

    This considers all owners, not only the strictest and the laxest in a class: if deltas differ,
    an owner in between may spend more than both.
    """
    epsilon = plan.epsilon(steps=steps)
    spending = []
    for budget_class in classes:
        members = budget_class.members
        of_members = epsilon[members]
        spending.append(
            Spent(
                float(of_members.min()),
                float(of_members.max()),
                float((of_members / plan.targets[members]).max()),
                int(members[of_members.argmax()]),
            )
        )
    return spending


def classes_of(plan: Plan) -> list[BudgetClass]:
    """Return at most 12 budget classes, strictest first."""
    return sorted(plan.rows(), key=lambda row: (row.epsilon, row.delta))


def attacker_bound(epsilon: float, delta: float) -> float:
    """Return an upper bound on how many of 100 guesses about one record an attacker gets right.

    The attacker knows everything except whether the record was used; without the model, 50 of 100
    guesses would be right. (epsilon, delta)-differential privacy bounds the sum of the attacker's
    two error rates from below by 2 (1 - delta) / (1 + e^epsilon).
    """
    return 100.0 * (1.0 - (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0))))


def attacker_words(bound: float) -> str:
    """Return a bound in words, rounded up: "57.5 in 100", "99.97 in 100"."""
    for digits in (1, 2, 3, 4):
        rounded = math.ceil(bound * 10**digits - 1e-9) / 10**digits
        if rounded < 100:
            return f"{rounded:.{digits}f} in 100"
    return "100 in 100"
