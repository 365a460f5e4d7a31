"""Assign the records of a data set to owners by a column or, to simulate owners, by class.

Each function takes a `DataSet` and returns an `Assignment`. An assignment `a` states who owns which
training record and what each owner's epsilon is; to use it, call
`Owners(a.record_owner, a.epsilon, delta)`. The assignment also states which group each validation
or test record belongs to. Group budgets are declared, never computed from labels.

For your own data, take the owners from a column (`by_column`). Owners formed from classes are a
simulation for public benchmarks: a record's owner, which is public, then reveals the record's
label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError, Problems, name_some
from ownerwise.registry import Registry

Budgets = Mapping[str, float] | Sequence[float]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who owns which training record, and how records are grouped for evaluation.

    Attributes:
        description: the assignment in words.
        record_owner: owner id of each training record, in the order of the records.
        epsilon: {id: epsilon}; or, if every record is its own owner, an array in record order.
        group_budgets: {group: epsilon}, with the declared or mean budget of each group.
        class_groups: the group of each class, if classes determine the groups.
        column: the name in `Records.columns` of the column that determines the groups, if any.
    """

    description: str
    record_owner: np.ndarray
    epsilon: Mapping[Any, float] | np.ndarray
    group_budgets: Mapping[str, float]
    class_groups: tuple[str, ...] = ()
    column: str | None = None

    def groups(self, records: Records) -> np.ndarray:
        """Return the group name of each validation or test record."""
        if self.column is not None:
            return _column(records, self.column).astype(str)
        return np.array(self.class_groups)[records.targets]


def evenly(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return `count` evenly spaced budgets from `low` to `high`."""
    return tuple(np.linspace(low, high, count).tolist())


def by_class(data: DataSet, budgets: Budgets) -> Assignment:
    """Assign each class to an owner of the same name.

    `budgets` lists the budgets in the order of the classes, or maps class names to budgets.
    """
    return by_classes(data, {name: (name,) for name in data.classes}, budgets)


def by_classes(data: DataSet, classes: Mapping[str, Sequence[str]], budgets: Budgets) -> Assignment:
    """Assign each owner the classes listed for it in `{owner: class names}`.

    Each class must have exactly one owner.
    `budgets` lists the budgets in the order of the owners, or maps their names to budgets.
    """
    if not data.classes:
        raise OwnerwiseError(
            f"{data.name} has a numeric target, so owners cannot be formed from classes: name the "
            "owners in a column"
        )
    declared = named_budgets(budgets, tuple(classes))
    class_groups = owners_of_classes(data, classes)
    return Assignment(
        f"{len(classes)} owners by class",
        np.array(class_groups)[data.train.targets],
        declared,
        declared,
        class_groups,
    )


def by_column(data: DataSet, column: str, epsilon: Mapping[int | str, float]) -> Assignment:
    """Take the owners from a column, such as `clinic`, or the `owner` column from `load_table`.

    Validation and test records are grouped by the same column.
    """
    owners = _column(data.train, column)
    budgets = {str(owner): float(value) for owner, value in epsilon.items()}
    return Assignment(f"owners by {column}", owners, dict(epsilon), budgets, column=column)


ASSIGNMENTS: Registry[Callable[..., Assignment]] = Registry(
    "ownerwise.assignments",
    {"by_class": by_class, "by_classes": by_classes},
    kind="assignment",
    leading=1,
)
"""Simulated assignments by name, for configuration files. Each function takes the data, `budgets`
and possibly other options. Other packages can add assignments through the entry-point group
`ownerwise.assignments`.
"""


def named_budgets(given: Budgets, names: tuple[str, ...]) -> dict[str, float]:
    """Return a budget for each name, in the order of the names."""
    problems = Problems()
    if isinstance(given, Mapping):
        lacking = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        if lacking:
            problems.add(f"no budget for {name_some(lacking, repr)}; expected one for each name")
        if unknown:
            problems.add(
                f"budget given for the unknown name {name_some(unknown, repr)}; expected one of "
                f"{name_some(names, repr, shown=10)}"
            )
        budgets = dict(given)
    else:
        if len(given) != len(names):
            problems.add(f"{len(given)} budgets for {len(names)} names; expected one for each name")
        budgets = dict(zip(names, given, strict=False))
    wrong = [f"{name} ({value!r})" for name, value in budgets.items() if not value > 0]
    if wrong:
        problems.add(f"invalid epsilon for {name_some(wrong)}; expected a number above 0")
    problems.raise_()
    return {name: float(budgets[name]) for name in names}


def owners_of_classes(data: DataSet, classes: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return each class's owner; raise an error unless each class is known and has one owner."""
    owners: dict[str, list[str]] = {name: [] for name in data.classes}
    problems = Problems()
    for owner, names in classes.items():
        for name in names:
            if name in owners:
                owners[name].append(owner)
            else:
                problems.add(f"owner {owner!r}: {data.name} has no class {name!r}")
    problems += [
        f"class {name!r} has {len(holders)} owners; expected exactly one: "
        + (
            "assign it to an owner, or exclude it with data.only"
            if not holders
            else "remove the others"
        )
        for name, holders in owners.items()
        if len(holders) != 1
    ]
    problems.raise_()
    return tuple(holders[0] for holders in owners.values())


def _column(records: Records, column: str) -> np.ndarray:
    if column not in records.columns:
        known = name_some(list(records.columns), repr, shown=20)
        expected = f"expected one of {known}" if known else "they have no columns"
        raise OwnerwiseError(f"the records have no column {column!r}; {expected}")
    return records.columns[column]
