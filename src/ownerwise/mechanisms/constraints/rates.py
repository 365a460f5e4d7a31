"""Rates of predictions, sums and differences of them, and constraints: a small algebra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.constraints.partition import Condition, Partition


def rate(
    event: Condition | None = None,
    *,
    pred: Any = None,
    where: Condition | None = None,
    given: Condition | None = None,
) -> Expression:
    """Return the share of records with an event, among those in `where` and `given`.

    Args:
        event: what is counted, such as `part.wrong`.
        pred: counts predictions of this class, or of these classes (a list), instead of an event.
        where: among whom, such as `part["sex"] == "F"`.
        given: on what condition, such as `part["label"] == 1`, or `part.predicted == 1`.

    Example:
        >>> part = Partition({"sex": ("F", "M"), "label": (0, 1)})
        >>> rate(pred=1, where=part["sex"] == "F", given=part["label"] == 1) >= 0.8
        Constraint('rate(predicted = 1 | sex = F and label = 1) ≥ 0.8')
    """
    conditions = [condition for condition in (where, given) if condition is not None]
    known = [condition for condition in (event, *conditions) if condition is not None]
    if (event is None) == (pred is None):
        raise OwnerwiseError("give rate an event, or pred=, a class; it got both or neither")
    if not known:
        raise OwnerwiseError(
            "rate(pred=...) cannot tell its partition: give where=part.everyone for all records"
        )
    partition = known[0].partition
    if event is None:
        event = partition.predicted.isin(pred if isinstance(pred, list | tuple) else [pred])
    base = partition.everyone
    for condition in conditions:
        base = base & condition
    among = f" | {base.name}" if base.name else ""
    made = Rate(f"rate({event.name}{among})", partition, (event & base).mask, base.mask)
    return Expression(((1.0, made),))


@dataclass(frozen=True, eq=False)
class Rate:
    """A count over another one: sums of the histogram over two sets of (cell, class) pairs."""

    name: str
    partition: Partition
    numerator: np.ndarray = field(repr=False)  # bool [cells, classes], within the denominator
    denominator: np.ndarray = field(repr=False)

    def __post_init__(self):
        if not self.denominator.any():
            raise OwnerwiseError(
                f"{self.name}: no cell of the partition meets its condition, so it is a rate among "
                "nobody; expected at least one"
            )

    @property
    def fixed_base(self) -> bool:
        """Whether the denominator does not depend on the model: it counts whole cells."""
        return bool((self.denominator.all(axis=1) | ~self.denominator.any(axis=1)).all())


@dataclass(frozen=True, eq=False)
class Expression:
    """A constant plus multiples of rates. Compare with a number to get a `Constraint`."""

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
        """Refuse `and` and `or`, which would drop a rate."""
        raise OwnerwiseError(
            f"{self} is neither true nor false: compare it with a bound, such as {self} <= 0.1"
        )

    def __str__(self) -> str:
        words = [f"{weight:+g} {term.name}" for weight, term in self.terms]
        words += [f"{self.constant:+g}"] if self.constant or not words else []
        text = " ".join(words).replace("+1 rate", "+ rate").replace("-1 rate", "- rate")
        return text.removeprefix("+ ").removeprefix("+")


def _constraint(left: Expression, sense: str, right: Expression | float) -> Constraint:
    """Return left ≤ right or left ≥ right, with all rates on the left and the bound right."""
    moved = left - right if isinstance(right, Expression) else left
    bound = 0.0 if isinstance(right, Expression) else float(right)
    if not moved.terms:
        raise OwnerwiseError(f"{moved} {sense} {bound:g} has no rate; expected at least one")
    if not math.isfinite(bound):
        raise OwnerwiseError(f"{moved} {sense} {bound}: expected a finite bound")
    return Constraint(f"{moved} {sense} {bound:g}", moved, sense, bound)


@dataclass(frozen=True, eq=False, repr=False)
class Constraint:
    """An expression of rates that must not exceed, or not fall below, a bound."""

    name: str
    expression: Expression
    sense: str
    bound: float

    @property
    def partition(self) -> Partition:
        """The partition that its rates are about."""
        return self.expression.terms[0][1].partition

    def named(self, name: str) -> Constraint:
        """Return the same constraint under another name."""
        return Constraint(name, self.expression, self.sense, self.bound)

    def excess(self, value: float) -> float:
        """Return by how much a value of the expression breaks the constraint; negative if not."""
        return value - self.bound if self.sense == "≤" else self.bound - value

    def value(self, histogram: np.ndarray) -> float | None:
        """Return the expression on a histogram [cells, classes]; None where a group is empty."""
        total = self.expression.constant
        for weight, term in self.expression.terms:
            among = histogram[term.denominator].sum()
            if among <= 0:
                return None
            total += weight * histogram[term.numerator].sum() / among
        return float(total)

    def __bool__(self) -> NoReturn:
        """Refuse `low <= rate <= high`, and `and`, which would drop a constraint."""
        raise OwnerwiseError(
            f"{self.name} is neither true nor false by itself, and low <= rate <= high would keep "
            "one bound only; write two constraints, [rate >= low, rate <= high]"
        )

    def __repr__(self) -> str:
        return f"Constraint({self.name!r})"


def flattened(constraints: Constraint | Sequence[Any]) -> list[Constraint]:
    """Return constraints, lists of them, and lists of lists as one list of different names."""
    if isinstance(constraints, Constraint):
        return [constraints]
    if not isinstance(constraints, Sequence) or isinstance(constraints, str):
        raise OwnerwiseError(
            f"{constraints!r} is no constraint; expected a rate compared with a bound, such as "
            "rate(pred=1, where=...) <= 0.1, or a list of such"
        )
    found = [one for part in constraints for one in flattened(part)]
    problems = []
    if not found:
        problems.append("no constraints were given; expected at least one")
    if len({id(one.partition) for one in found}) > 1:
        problems.append("the constraints are about several partitions; make one with all columns")
    names = [one.name for one in found]
    problems += [f"two constraints are named {n!r}" for n in set(names) if names.count(n) > 1]
    if problems:
        raise OwnerwiseError(problems)
    return found
