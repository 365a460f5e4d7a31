"""Partitions: public rules that assign each record to a cell based on its group, label, etc."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError, Problems, name_some

LABEL = "label"
"""Name of the column that contains the record's class."""


class Partition:
    """Cells defined by column values. The definition is public; a record's cell is private.

    A column named "label" contains the record's class. Omit this column if no constraint refers to
    the true class: with fewer cells, each contains more records and the noise matters less.

    Args:
        columns: each column's name and the public list of its values.
        classes: the classes, or their number; by default the values of the column "label".

    Example:
        >>> part = Partition({"sex": ("F", "M"), "label": (0, 1)})
        >>> part.cells({"sex": ["F", "M", "F"], "label": [0, 0, 1]})
        array([0, 2, 1])
        >>> (part["sex"] == "F").name
        'sex = F'
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Any]], classes: int | Sequence[Any] | None = None
    ):
        self.columns = {name: tuple(values) for name, values in columns.items()}
        if classes is None:
            classes = self.columns.get(LABEL, ())
        self.classes = tuple(range(classes) if isinstance(classes, int) else classes)
        problems = Problems(
            f"column {name!r} has the values {values}; expected at least one value and no "
            "duplicates"
            for name, values in self.columns.items()
            if not values or len(set(values)) < len(values)
        )
        if len(set(self.classes)) < max(2, len(self.classes)):
            problems.add(
                f"classes {self.classes}: expected at least two distinct classes; pass classes= "
                f"or add a {LABEL!r} column that lists the class labels"
            )
        elif LABEL in self.columns and self.columns[LABEL] != self.classes:
            problems.add(
                f"column {LABEL!r} has the values {self.columns[LABEL]}, but the classes are "
                f"{self.classes}; expected the same values in the same order"
            )
        problems.raise_()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and number of classes."""
        return math.prod(map(len, self.columns.values())), len(self.classes)

    def cells(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Return each record's cell (int64), given one value per record for each column."""
        problems = Problems(self._column_problems(set(columns)))
        cells = np.int64(0)
        for name, values in self.columns.items():
            if name in columns:
                at = _positions(columns[name], values, f"column {name!r}", problems)
                if np.shape(cells) not in ((), at.shape):
                    problems.add(
                        f"column {name!r} has {len(at)} records, but the columns before it have "
                        f"{np.size(cells)}; expected the same number"
                    )
                    continue
                cells = cells * len(values) + at
        problems.raise_()
        return np.atleast_1d(cells)

    def targets(self, labels: Any, columns: Mapping[str, Any] | None = None) -> Tensor:
        """Return the targets for constrained training: class and cell, int64 [records, 2].

        Args:
            labels: the class of each record, one of `classes`.
            columns: the other columns, as a mapping or DataFrame with one value per record in each
                column.
        """
        problems = Problems()
        classes = _positions(labels, self.classes, "labels", problems)
        problems.raise_()
        columns = {} if columns is None else {name: columns[name] for name in columns}
        if LABEL in self.columns:
            columns[LABEL] = labels
        cells = self.cells(columns) if self.columns else np.zeros_like(classes)
        if len(cells) != len(classes):
            raise OwnerwiseError(
                f"got {len(classes)} labels, but {len(cells)} column entries; expected the same "
                "number of each"
            )
        return torch.from_numpy(np.stack([classes, cells], axis=1))

    def __getitem__(self, column: str) -> Column:
        """Return a column, to be compared with a value: `part["sex"] == "F"`."""
        if column not in self.columns:
            expected = name_some(list(self.columns)) or "none"
            if column == LABEL:
                added = self.columns | {LABEL: self.classes}
                expected += f". This column contains the record's class; add it: Partition({added})"
            raise OwnerwiseError(f"no column {column!r} in the partition; expected {expected}")
        axis = list(self.columns).index(column)
        sizes = [len(values) for values in self.columns.values()]
        position = np.indices(sizes).reshape(len(sizes), -1)[axis]
        return Column(self, column, self.columns[column], position[:, None])

    @property
    def predicted(self) -> Column:
        """The predicted class, which can be compared with classes: `part.predicted == 1`."""
        return Column(self, "predicted", self.classes, np.arange(len(self.classes))[None, :])

    @property
    def wrong(self) -> Condition:
        """The condition that the prediction differs from the label."""
        pairs = [(self[LABEL] == value) & (self.predicted != value) for value in self.classes]
        return Condition(self, "wrong", np.logical_or.reduce([pair.mask for pair in pairs]))

    @property
    def everyone(self) -> Condition:
        """The condition that holds for every record and every prediction."""
        return Condition(self, "", np.ones(self.shape, dtype=bool))

    def _column_problems(self, given: set[str]) -> list[str]:
        return [
            f"column {name!r} is {'missing' if name in self.columns else 'not in the partition'}; "
            f"expected {name_some(list(self.columns), shown=9)}"
            for name in sorted(given ^ set(self.columns))
        ]

    def __repr__(self) -> str:
        return f"Partition({self.columns}, classes={self.classes})"


@dataclass(frozen=True, eq=False)
class Condition:
    """A set of (cell, predicted class) pairs, which can be combined using `&`, `|` and `~`."""

    partition: Partition
    name: str
    mask: np.ndarray = field(repr=False)  # bool [cells, classes]

    def __and__(self, other: Condition) -> Condition:
        return self._with(other, " and ", self.mask & other.mask)

    def __or__(self, other: Condition) -> Condition:
        return self._with(other, " or ", self.mask | other.mask)

    def __invert__(self) -> Condition:
        return Condition(self.partition, f"not ({self.name})", ~self.mask)

    def __bool__(self) -> NoReturn:
        """Reject `and`, `or` and `not`, which would silently drop a condition."""
        raise OwnerwiseError(
            f"the condition {self.name!r} is neither true nor false on its own; combine "
            "conditions with & (and), | (or) and ~ (not), each in parentheses: "
            '(part["sex"] == "F") & (part["label"] == 1)'
        )

    def _with(self, other: Condition, word: str, mask: np.ndarray) -> Condition:
        if self.partition is not other.partition:
            raise OwnerwiseError(
                f"{self.name!r} and {other.name!r} belong to different partitions; use a single "
                "partition with all columns"
            )
        return Condition(self.partition, word.join(filter(None, (self.name, other.name))), mask)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a partition; comparing it with a value gives a `Condition`."""

    partition: Partition
    name: str
    values: tuple[Any, ...]
    position: np.ndarray = field(repr=False)  # index of each value, [cells, 1] or [1, classes]

    def __eq__(self, value: object) -> Condition:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.isin([value])

    def __ne__(self, value: object) -> Condition:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept = [other for other in self.values if other != value]
        self.isin([value])  # refuses unknown values
        return Condition(self.partition, f"{self.name} ≠ {value}", self.isin(kept).mask)

    def isin(self, values: Sequence[Any]) -> Condition:
        """Return a condition that is true if the column has one of these values."""
        if unknown := [value for value in values if value not in self.values]:
            raise OwnerwiseError(
                f"{self.name} = {name_some(unknown, repr)}: expected one of "
                f"{name_some(self.values, repr, shown=9)}"
            )
        wanted = [self.values.index(value) for value in values]
        mask = np.broadcast_to(np.isin(self.position, wanted), self.partition.shape)
        return Condition(self.partition, f"{self.name} = {' or '.join(map(str, values))}", mask)


def _positions(given: Any, values: tuple[Any, ...], what: str, problems: Problems) -> np.ndarray:
    """Return the int64 index of each record's value in the public list; report unknown values."""
    array = given.numpy() if isinstance(given, Tensor) else np.asarray(given)
    place = {value: at for at, value in enumerate(values)}
    if array.dtype == object:  # None and NaN cannot be sorted among words
        known, index = array.ravel().tolist(), np.arange(array.size).reshape(array.shape)
    else:
        distinct, index = np.unique(array, return_inverse=True)
        known = distinct.tolist()
    strange = np.array([value not in place for value in known], dtype=bool)[index]
    if strange.any():
        where = name_some(np.flatnonzero(strange), "record {}".format)
        problems.add(
            f"{what} has an unknown value in {where}; expected one of "
            f"{name_some(values, repr, shown=9)}. Correct it or add it to the list; give missing "
            "values a name, such as 'unknown'"
        )
    if array.ndim != 1:
        problems.add(f"{what} has shape {list(array.shape)}; expected one value per record")
    return np.array([place.get(value, 0) for value in known], dtype=np.int64)[index]
