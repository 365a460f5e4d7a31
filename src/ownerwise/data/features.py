"""Encode tables as numbers for a model, using a public schema.

Guarantee: with scaling by declared ranges, nothing is learned from the records. Ranges and lists of
categories are constants that the caller (or a data set's loader) declares, and each record is
encoded separately. You can also scale by statistics of the training records, but this releases
means and standard deviations without noise; a warning says so, and `not_private` lists them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems, name_some
from ownerwise.owners import plain_number

SCALES = ("ranges", "statistics", "none")
MISSING = ("", "?", None)


@dataclass(frozen=True)
class Number:
    """A numeric column with its declared range.

    Scaling by ranges maps low to -1 and high to 1; values outside the range are clipped, and
    missing values become 0, the midpoint. Without a range, the numbers are used unchanged.

    Attributes:
        name: the column's name.
        low, high: the declared range, or None.
        logarithmic: scale sign(x) log(1 + |x|) instead of x; useful for amounts and counts.
    """

    name: str
    low: float | None = None
    high: float | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class Category:
    """A column with a public list of categories; each becomes a 0/1 input (0 if missing)."""

    name: str
    values: tuple[str, ...]


Schema = Sequence[Number | Category]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Float32 inputs [records, features], feature names, and a list of what is not private."""

    inputs: np.ndarray
    names: tuple[str, ...]
    not_private: tuple[str, ...] = ()


def encode(
    cells: Mapping[str, Any],
    schema: Schema,
    scale: str = "ranges",
    train: np.ndarray | None = None,
) -> Encoded:
    """Return the inputs that a schema produces from columns of cells (text or numbers).

    Args:
        cells: the columns by name; "", "?" and None are missing values.
        schema: which columns become inputs, and how.
        scale: "ranges" (public), "statistics" (of the training records: NOT private) or "none".
        train: if scale is "statistics", the mask of the training records.
    """
    if scale not in SCALES:
        raise OwnerwiseError(f"scale {scale!r}; expected one of {', '.join(map(repr, SCALES))}")
    problems = Problems()
    blocks, names = [], []
    for feature in schema:
        column = cells[feature.name]
        if isinstance(feature, Category):
            blocks.append(_one_hot(column, feature, problems))
            names += [f"{feature.name}={value}" for value in feature.values]
        else:
            before = len(problems)
            values = _scaled(_numbers(column, feature.name, problems), feature, scale, train)
            if len(problems) == before and np.isnan(values).any():
                missing = name_some(np.flatnonzero(np.isnan(values)), record)
                problems.add(
                    f"column {feature.name}: a value is missing in {missing}, which is allowed "
                    "only with a declared range: declare one, or fill in the value"
                )
            blocks.append(values[:, None])
            names.append(feature.name)
    problems.raise_()
    not_private = ()
    if scale == "statistics":
        not_private = ("means and standard deviations of the features in the training records",)
        warnings.warn(
            "scale='statistics' uses means and standard deviations of the training records without "
            "noise: these statistics are NOT private; scale='ranges' uses declared ranges instead",
            PrivacyWarning,
            stacklevel=4,
        )
    inputs = np.concatenate(blocks, axis=1, dtype=np.float32, casting="same_kind")
    return Encoded(inputs, tuple(names), not_private)


def make_table(
    name: str,
    cells: Mapping[str, Any],
    schema: Schema,
    labels: tuple[np.ndarray, tuple[str, ...]],
    test: np.ndarray,
    columns: Mapping[str, np.ndarray],
    scale: str = "ranges",
) -> DataSet:
    """Encode cells and return them as a data set.

    Args:
        name: the data set's name.
        cells, schema, scale: as for `encode`.
        labels: the targets, and the names of the classes.
        test: a mask that is true for test records.
        columns: additional columns to keep for each record.
    """
    encoded = encode(cells, schema, scale, ~test)
    targets, classes = labels
    records = Records(encoded.inputs, targets, columns)
    form = {
        "ranges": "numbers scaled from declared ranges to [-1, 1]",
        "statistics": "numbers standardised",
        "none": "numbers unchanged",
    }[scale]
    return DataSet(
        name,
        records.take(~test),
        records.take(test) if test.any() else None,
        classes,
        features=encoded.names,
        form=f"float32 [{len(encoded.names)}], {form}, categories 0 or 1",
        not_private=encoded.not_private,
    )


def record(at: int) -> str:
    """Return a record's name for messages: its position, counted from 0, never its content."""
    return f"record {at}"


def class_of(cells: Sequence[Any], values: Sequence[Any], what: str) -> np.ndarray:
    """Return the targets: the position of each cell in the public list of values."""
    place = {value: at for at, value in enumerate(values)}
    unknown = [at for at, cell in enumerate(cells) if cell not in place]
    if unknown:
        raise OwnerwiseError(
            f"{what}: unknown value in {name_some(unknown, record)}; expected one of "
            f"{name_some(list(values), repr)}: correct the cell, or add the value to the list"
        )
    return np.array([place[cell] for cell in cells], dtype=np.int64)


def _numbers(column: Sequence[Any], name: str, problems: Problems) -> np.ndarray:
    """Return a column as float64, with NaN for missing values."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        values = column.astype(np.float64)
        wrong, texts = np.flatnonzero(np.isinf(values)).tolist(), False
    else:
        values = np.full(len(column), np.nan)
        wrong, texts = [], False
        for at, cell in enumerate(column):
            if cell in MISSING:
                continue
            try:
                values[at] = plain_number(cell)
            except (TypeError, ValueError):
                wrong.append(at)
                texts = True
            else:
                if math.isinf(values[at]):
                    wrong.append(at)
    if wrong:
        advice = ""
        if texts:
            advice = f", or declare its categories from public knowledge: {name} = ['a', 'b', ...]"
        problems.add(
            f"column {name}: no finite number in {name_some(wrong, record)}; expected one in every "
            f"record: correct the cell{advice}"
        )
    return values


def _scaled(
    values: np.ndarray, feature: Number, scale: str, train: np.ndarray | None
) -> np.ndarray:
    if scale == "none" or (scale == "ranges" and (feature.low is None or feature.high is None)):
        return values
    if feature.logarithmic:
        values = _signed_log(values)
    if scale == "statistics":
        known = values if train is None else values[train]
        known = known[~np.isnan(known)]
        deviation = known.std() if len(known) else 1.0
        centred = values - (known.mean() if len(known) else 0.0)
        return np.nan_to_num(centred / (deviation or 1.0), nan=0.0)
    low, high = np.array([feature.low, feature.high], dtype=np.float64)
    if feature.logarithmic:
        low, high = _signed_log(low), _signed_log(high)
    position = (np.clip(values, low, high) - low) / (high - low)  # from 0 to 1
    return np.nan_to_num(2 * position - 1, nan=0.0)


def _signed_log(values: Any) -> Any:
    return np.sign(values) * np.log1p(np.abs(values))


def _one_hot(column: Sequence[Any], feature: Category, problems: Problems) -> np.ndarray:
    place = {value: at for at, value in enumerate(feature.values)}
    cells = [None if cell in MISSING else str(cell) for cell in column]
    unknown = [at for at, cell in enumerate(cells) if cell is not None and cell not in place]
    if unknown:
        problems.add(
            f"column {feature.name}: the value in {name_some(unknown, record)} is not in the "
            f"declared list {name_some(feature.values, repr)}; add it, or correct the cell"
        )
    block = np.zeros((len(cells), len(place)), dtype=np.float32)
    known = [(row, place[cell]) for row, cell in enumerate(cells) if cell in place]
    if known:
        block[tuple(np.array(known).T)] = 1
    return block
