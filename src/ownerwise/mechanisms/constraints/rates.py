"""A small algebra of prediction rates, their sums and differences, and constraints on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.mechanisms.constraints.partition import Condition, Partition


def rate(
    event: Condition | None = None,
    *,
    pred: Any = None,
    where: Condition | None = None,
    given: Condition | None = None,
) -> Expression:
    """Return how often an event occurs among the records that satisfy `where` and `given`.

    Args:
        event: the event to count, such as `part.wrong`.
        pred: count predictions of this class, or of a list of classes, instead of an event.
        where: the group, such as `part["sex"] == "F"`.
        given: an additional condition, such as `part["label"] == 1` or `part.predicted == 1`.

    Example:
        >>> part = Partition({"sex": ("F", "M"), "label": (0, 1)})
        >>> rate(pred=1, where=part["sex"] == "F", given=part["label"] == 1) >= 0.8
        Constraint('rate(predicted = 1 | sex = F and label = 1) ≥ 0.8')
    """
    conditions = [condition for condition in (where, given) if condition is not None]
    known = [condition for condition in (event, *conditions) if condition is not None]
    if (event is None) == (pred is None):
        raise OwnerwiseError("rate needs either an event or a class (pred=); got both or neither")
    if not known:
        raise OwnerwiseError(
            "rate(pred=...) has no partition: for all records, pass where=part.everyone"
        )
    partition = known[0].partition
    if event is None:
        event = partition.predicted.isin(pred if isinstance(pred, list | tuple) else [pred])
    base = partition.everyone
    for condition in conditions:
        base = base & condition
    among = f" | {base.name}" if base.name else ""
    term = Rate(f"rate({event.name}{among})", partition, (event & base).mask, base.mask)
    return Expression(((1.0, term),))


@dataclass(frozen=True, eq=False)
class Rate:
    """A ratio of two counts. Each count sums the histogram over a set of (cell, class) pairs."""

    name: str
    partition: Partition
    numerator: np.ndarray = field(repr=False)  # bool [cells, classes], within the denominator
    denominator: np.ndarray = field(repr=False)

    def __post_init__(self):
        if not self.denominator.any():
            raise OwnerwiseError(
                f"{self.name}: no cell of the partition satisfies its condition; expected at least "
                "one"
            )

    @property
    def fixed_base(self) -> bool:
        """Whether the denominator counts whole cells and so does not depend on the model."""
        return bool((self.denominator.all(axis=1) | ~self.denominator.any(axis=1)).all())


@dataclass(frozen=True, eq=False)
class Expression:
    """A constant plus a weighted sum of rates; comparing it with a number gives a `Constraint`."""

    terms: tuple[tuple[float, Rate], ...] = ()
    constant: float = 0.0

    def __add__(self, other: Expression | float) -> Expression:
        other = other if isinstance(other, Expression) else Expression(constant=float(other))
        return Expression(self.terms + other.terms, self.constant + other.constant)

    def __mul__(self, factor: float) -> Expression:
        terms = tuple((factor * weight, term) for weight, term in self.terms)
        return Expression(terms, factor * self.constant)

    def __neg__(self) -> Expression:
        return self * -1.0

    def __sub__(self, other: Expression | float) -> Expression:
        return self + -1 * other

    def __rsub__(self, other: Expression | float) -> Expression:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __le__(self, bound: Expression | float) -> Constraint:
        return _constraint(self, "≤", bound)

    def __ge__(self, bound: Expression | float) -> Constraint:
        return _constraint(self, "≥", bound)

    def __bool__(self) -> NoReturn:
        """Reject `and` and `or`, which would silently drop a rate."""
        raise OwnerwiseError(
            f"{self} is neither true nor false: compare it with a bound, such as {self} <= 0.1"
        )

    def __str__(self) -> str:
        words = [f"{weight:+g} {term.name}" for weight, term in self.terms]
        words += [f"{self.constant:+g}"] if self.constant or not words else []
        text = " ".join(words).replace("+1 rate", "+ rate").replace("-1 rate", "- rate")
        return text.removeprefix("+ ").removeprefix("+")


def _constraint(left: Expression, sense: str, right: Expression | float) -> Constraint:
    """Return the constraint left ≤ right or left ≥ right, with all rates moved to the left."""
    moved = left - right if isinstance(right, Expression) else left
    bound = 0.0 if isinstance(right, Expression) else float(right)
    if not moved.terms:
        raise OwnerwiseError(f"{moved} {sense} {bound:g} contains no rate; expected at least one")
    if not math.isfinite(bound):
        raise OwnerwiseError(f"{moved} {sense} {bound}: expected a finite bound")
    return Constraint(f"{moved} {sense} {bound:g}", moved, sense, bound)


@dataclass(frozen=True, eq=False, repr=False)
class Constraint:
    """An upper or lower bound on a linear combination of rates."""

    name: str
    expression: Expression
    sense: str
    bound: float

    @property
    def partition(self) -> Partition:
        """The partition that the rates refer to."""
        return self.expression.terms[0][1].partition

    def named(self, name: str) -> Constraint:
        """Return the same constraint under another name."""
        return Constraint(name, self.expression, self.sense, self.bound)

    def excess(self, value: float) -> float:
        """Return the amount by which a value violates the constraint (negative if it holds)."""
        return value - self.bound if self.sense == "≤" else self.bound - value

    def value(self, histogram: np.ndarray) -> float | None:
        """Return the value for a histogram [cells, classes], or None if a group is empty."""
        total = self.expression.constant
        for weight, term in self.expression.terms:
            among = histogram[term.denominator].sum()
            if among <= 0:
                return None
            total += weight * histogram[term.numerator].sum() / among
        return float(total)

    def __bool__(self) -> NoReturn:
        """Reject `low <= rate <= high` and `and`, which would silently drop a constraint."""
        raise OwnerwiseError(
            f"{self.name} is neither true nor false on its own, and low <= rate <= high would keep "
            "only one bound; write two constraints, [rate >= low, rate <= high]"
        )

    def __repr__(self) -> str:
        return f"Constraint({self.name!r})"


def flattened(constraints: Constraint | Sequence[Any]) -> list[Constraint]:
    """Return nested lists of constraints as one list with distinct names."""
    if isinstance(constraints, Constraint):
        return [constraints]
    if not isinstance(constraints, Sequence) or isinstance(constraints, str):
        raise OwnerwiseError(
            f"{constraints!r} is not a constraint; expected a rate compared with a bound, such as "
            "rate(pred=1, where=...) <= 0.1, or a list of such constraints"
        )
    flat = [constraint for nested in constraints for constraint in flattened(nested)]
    problems = Problems()
    if not flat:
        problems.add("expected at least one constraint, got none")
    if len({id(constraint.partition) for constraint in flat}) > 1:
        problems.add(
            "the constraints use several partitions; use a single partition with all columns"
        )
    names = [constraint.name for constraint in flat]
    problems += [f"two constraints are named {n!r}" for n in set(names) if names.count(n) > 1]
    problems.raise_()
    return flat
