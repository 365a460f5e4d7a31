"""Encode tables as numbers for a model, using a public schema.

Guarantee: with scaling by declared ranges, nothing is learned from the records. Ranges and lists of
categories are constants that the caller (or a data set's loader) declares, and each record is
encoded separately. This includes "released": the statistics by which the columns are standardised
are then released with noise at the start of training, and the plan accounts for them. You can also
scale by statistics of the training records, but this releases means and standard deviations without
noise; a warning says so, and `not_private` lists them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from ownerwise.data.cells import code_of, day_of, missing_test, number_of
from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems, name_some

SCALES = ("ranges", "released", "statistics", "none")


@dataclass(frozen=True)
class Number:
    """A numeric column with its declared range.

    Scaling by ranges maps low to -1 and high to 1; values outside the range are clipped, and
    missing values become 0, the midpoint. Without a range, the numbers are used unchanged.

    Attributes:
        name: the column's name.
        low, high: the declared range, or None.
        logarithmic: scale sign(x) log(1 + |x|) instead of x; useful for amounts and counts.
        unit: the unit that may follow the number in a cell, such as "kg"; any other is refused.
        decimal: "." or ",", the decimal separator in text.
        missing: codes of missing values, such as (-9, "NA"), besides "", "?" and None.
    """

    name: str
    low: float | None = None
    high: float | None = None
    logarithmic: bool = False
    unit: str = ""
    decimal: str = "."
    missing: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Category:
    """A column with a public list of categories; each becomes a 0/1 input (0 if missing).

    A code that is a whole number matches however it is written: 1, 1.0, "1" and "1.0" are equal.
    """

    name: str
    values: tuple[str, ...]
    missing: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Date:
    """A column of dates with its declared range, which becomes a number.

    Attributes:
        name: the column's name.
        first, last: the declared range: ISO dates such as "1920-01-01", or date objects.
        format: how the dates are written, such as "%d.%m.%Y"; by default ISO 8601.
        missing: codes of missing values, as for `Number`.
    """

    name: str
    first: str | date
    last: str | date
    format: str = ""
    missing: tuple[Any, ...] = ()

    def days(self) -> Number:
        """Return the column as one of numbers of days, with its range."""
        return Number(self.name, day_of(self.first), day_of(self.last), missing=self.missing)


Schema = Sequence[Number | Category | Date]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Float32 inputs [records, features], feature names, and a list of what is not private.

    `numbers` is the number of columns at the front that a layer `Standardise` is to standardise,
    followed by as many 0/1 columns for missing values.
    """

    inputs: np.ndarray
    names: tuple[str, ...]
    not_private: tuple[str, ...] = ()
    numbers: int = 0


def encode(
    cells: Mapping[str, Any],
    schema: Schema,
    scale: str = "ranges",
    train: np.ndarray | None = None,
) -> Encoded:
    """Return the inputs that a schema produces from columns of cells (text or numbers).

    Args:
        cells: the columns by name; "", "?", None, NaN and declared codes are missing values.
        schema: which columns become inputs, and how.
        scale: "ranges" (public), "released" (by declared ranges, for a network behind a layer
            `Standardise`: numbers first, then a 0/1 input for each that says whether it is
            missing), "statistics" (of the training records: NOT private) or "none".
        train: if scale is "statistics", the mask of the training records.
    """
    if scale not in SCALES:
        raise OwnerwiseError(f"scale {scale!r}; expected one of {', '.join(map(repr, SCALES))}")
    problems = Problems()
    numbers: dict[str, np.ndarray] = {}
    flags: dict[str, np.ndarray] = {}
    blocks: dict[str, np.ndarray] = {}
    for feature in schema:
        column = cells[feature.name]
        if isinstance(feature, Category):
            blocks |= _one_hot(column, feature, problems)
            continue
        before = len(problems)
        values, feature = _values(column, feature, problems)
        if scale == "released" and (feature.low is None or feature.high is None):
            problems.add(
                f"column {feature.name} has no declared range, which statistics paid for by the "
                f"plan need: declare one that is surely wide enough, {feature.name} = [low, high]"
            )
            continue
        scaled = _scaled(values, feature, scale, train)
        if len(problems) == before and np.isnan(scaled).any():
            missing = name_some(np.flatnonzero(np.isnan(scaled)), record)
            problems.add(
                f"column {feature.name}: a value is missing in {missing}, which is allowed "
                "only with a declared range: declare one, or fill in the value"
            )
        if scale == "released":
            numbers[feature.name] = scaled
            flags[f"{feature.name} missing"] = np.isnan(values)
        else:
            blocks[feature.name] = scaled
    if scale == "released" and not numbers and not problems:
        problems.add("no column of numbers is declared, so there are no statistics to release")
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
    columns = numbers | flags | blocks
    inputs = np.stack(list(columns.values()), axis=1).astype(np.float32)
    return Encoded(inputs, tuple(columns), not_private, len(numbers))


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
        "released": "numbers scaled from declared ranges to [-1, 1], then by paid statistics",
        "statistics": "numbers standardised",
        "none": "numbers unchanged",
    }[scale]
    return DataSet(
        name,
        records.take(~test),
        records.take(test) if test.any() else None,
        classes,
        features=encoded.names,
        form=f"{len(encoded.names)} inputs, {form}, categories 0 or 1",
        not_private=encoded.not_private,
        numbers=encoded.numbers,
    )


def record(at: int) -> str:
    """Return a record's name for messages: its position, counted from 0, never its content."""
    return f"record {at}"


def class_of(cells: Sequence[Any], values: Sequence[Any], what: str) -> np.ndarray:
    """Return the targets: the position of each cell in the public list of values."""
    place = _places(values)
    cells = [cell if cell in place else code_of(cell) for cell in cells]
    unknown = [at for at, cell in enumerate(cells) if cell not in place]
    if unknown:
        raise OwnerwiseError(
            f"{what}: unknown value in {name_some(unknown, record)}; expected one of "
            f"{name_some(list(values), repr)}: correct the cell, or add the value to the list"
        )
    return np.array([place[cell] for cell in cells], dtype=np.int64)


def _places(values: Sequence[Any]) -> dict[Any, int]:
    """Return the position of each value, as written and as a code, if that is not ambiguous."""
    codes = [code_of(value) for value in values]
    known = {code: at for at, code in enumerate(codes) if codes.count(code) == 1}
    return known | {value: at for at, value in enumerate(values)}


def _values(
    column: Sequence[Any], feature: Number | Date, problems: Problems
) -> tuple[np.ndarray, Number]:
    """Return a column as float64, with NaN for missing values, and the feature as a number."""
    dates = isinstance(feature, Date)
    number = feature.days() if isinstance(feature, Date) else feature
    if not dates and isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        values = column.astype(np.float64)
        for code in feature.missing:
            with contextlib.suppress(TypeError, ValueError):  # a code such as "NA"
                values[values == float(code)] = np.nan
        wrong, texts = np.flatnonzero(np.isinf(values)).tolist(), False
    else:
        values, is_missing = np.full(len(column), np.nan), missing_test(feature.missing)
        wrong, texts = [], False
        for at, cell in enumerate(column):
            if is_missing(cell):
                continue
            try:
                if isinstance(feature, Date):
                    values[at] = day_of(cell, feature.format)
                else:
                    values[at] = number_of(cell, feature.unit, feature.decimal)
            except (TypeError, ValueError, OverflowError):
                wrong.append(at)
                texts = True
            else:
                if np.isinf(values[at]):
                    wrong.append(at)
    if wrong:
        name, where = feature.name, name_some(wrong, record)
        if isinstance(feature, Date):
            problems.add(
                f"column {name}: no date in {where}; expected one in every record, written as "
                f"{feature.format or 'YYYY-MM-DD'}: correct the cell, or declare the format"
            )
        else:
            problems.add(f"column {name}: no finite number in {where}; {_advice(feature, texts)}")
    return values, number


def _advice(feature: Number, texts: bool) -> str:
    """Return what to do about cells that are not numbers; `texts` tells whether some are text."""
    name = feature.name
    words = "expected one in every record: correct the cell"
    if not texts:
        return words
    if feature.low is None and not feature.missing:
        return (
            f"{words}, or declare its categories from public knowledge: {name} = ['a', 'b', ...]; "
            f"for numbers with units, {name} = {{ range = [low, high], unit = 'kg' }}"
        )
    return (
        f"{words}, or say how numbers and missing values are written: {name} = {{ range = [low, "
        "high], unit = 'kg', decimal = ',', missing = ['NA'] }"
    )


def _scaled(
    values: np.ndarray, feature: Number, scale: str, train: np.ndarray | None
) -> np.ndarray:
    if scale == "none" or (scale != "statistics" and None in (feature.low, feature.high)):
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


def _one_hot(column: Sequence[Any], feature: Category, problems: Problems) -> dict[str, np.ndarray]:
    """Return a 0/1 column for each category."""
    place, is_missing = _places(feature.values), missing_test(feature.missing)
    cells = [None if is_missing(cell) else code_of(cell) for cell in column]
    unknown = [at for at, cell in enumerate(cells) if cell is not None and cell not in place]
    if unknown:
        problems.add(
            f"column {feature.name}: the value in {name_some(unknown, record)} is not in the "
            f"declared list {name_some(feature.values, repr)}; add it, or correct the cell"
        )
    at = np.array([-1 if cell is None else place.get(cell, -1) for cell in cells])
    return {f"{feature.name}={value}": at == row for row, value in enumerate(feature.values)}
