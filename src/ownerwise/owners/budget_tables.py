"""Read budgets from mappings, arrays, DataFrames, and CSV and Parquet files.

A table has the columns `owner, epsilon[, delta][, records]` and one row per owner; a delta may be
left blank. Each source is converted to `BudgetColumn`s for epsilon, delta and records, with a
separate column for the deltas in a table. Reading does not stop at the first problem: each problem
is added to a list, and reading continues with the valid values.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.owners.tables import (
    HEADER_ALONE,
    PARQUET,
    as_array,
    as_ids,
    csv_rows,
    is_missing,
    parquet_columns,
    text_ids,
)

COLUMNS = ("owner", "epsilon", "delta", "records")
DEFAULT_DELTA = 1e-5
OWN_DELTA = "own delta"
"""Key for the deltas in a table; the key "delta" is for owners whose delta the table omits."""
GIVE_LEVELS = "levels={'high': 0.5, ...}"
GIVE_RECORDS = "declare the numbers of records with records="

Pairs = Sequence[tuple[str, np.ndarray]]
"""The columns of a table, as (name, cells) pairs."""

_VALID: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "epsilon": lambda values: np.isfinite(values) & (values > 0),
    "delta": lambda values: (values > 0) & (values < 1),
    "records": lambda values: (values >= 1) & (values < 2**53) & (values == np.floor(values)),
}
_EXPECTED = {
    "epsilon": "expected a positive, finite number (typically 0.1 to 10)",
    "delta": "expected a number above 0 and below 1, well below 1/records (typically 1e-5)",
    "records": "expected a whole number of at least 1; leave out owners who have none",
}


@dataclass(frozen=True, eq=False)
class BudgetColumn:
    """The values given for epsilon, delta or records.

    Attributes:
        what: "epsilon", "delta" or "records".
        cells: the values as given, [owners]; shape [] for a single value for all owners.
        where: the source, as named in messages.
        names: the owner of each cell, as given; None if the cells are in the order of the sorted
            owner ids.
        rows: the table row of each cell; None if the source is not a table.
        ids: the distinct names, sorted, as int64 or str; cells, names and rows are then in the same
            order. None if no names were given, or some of them are invalid.
    """

    what: str
    cells: np.ndarray
    where: str
    names: np.ndarray | None = None
    rows: np.ndarray | None = None
    ids: np.ndarray | None = None

    def numbers(
        self, ids: np.ndarray | None, levels: Mapping[str, float], problems: list[str]
    ) -> np.ndarray:
        """Return the cells as float64, in the same shape, and report every invalid value.

        `ids` names the owners if the column does not. A blank delta in a table becomes NaN.
        """
        cells = self.cells.ravel()
        if cells.dtype.kind in "iuf":
            values, unreadable = cells.astype(np.float64), np.zeros(len(cells), dtype=bool)
        else:
            levels = levels if self.what == "epsilon" else {}
            read = [_number(cell, levels) for cell in cells.tolist()]
            values = np.array(read, dtype=np.float64)
            unreadable = np.array([number is None for number in read], dtype=bool)
        expected = "not a number; enter a number for each owner"
        if self.what == "epsilon":
            known = name_some(list(levels), shown=10) or f"none; pass {GIVE_LEVELS}"
            expected = f"neither a number nor a known level; correct it (known levels: {known})"
        invalid = ~unreadable & ~_VALID[self.what](values)
        if self.what == "delta" and self.rows is not None:
            blank = [at for at in np.flatnonzero(unreadable | invalid) if is_missing(cells[at])]
            unreadable[blank] = invalid[blank] = False
        self._report(unreadable, ids, expected, problems)
        self._report(invalid, ids, _EXPECTED[self.what], problems)
        return values.reshape(self.cells.shape)

    def _report(
        self, wrong: np.ndarray, ids: np.ndarray | None, expected: str, problems: list[str]
    ) -> None:
        at = np.flatnonzero(wrong)
        if not len(at):
            return
        names = ids if self.names is None else self.names
        if not self.cells.ndim:
            owners = f"all owners ({self.cells.tolist()!r})"
        elif names is None or len(names) != len(self.cells):
            owners = f"entry {name_some(at, lambda i: f'{i} ({self._cell(i)})')}"
        else:
            owners = f"owner {name_some(at, lambda i: f'{names[i]} ({self._cell(i)})')}"
        source = "" if self.rows is None else f" in {self.where}"
        problems.append(f"{self.what} of {owners}{source}: {expected}")

    def _cell(self, at: int) -> str:
        (cell,) = self.cells[at : at + 1].tolist()
        return repr(cell) if self.rows is None else f"{cell!r}, row {self.rows[at]}"


def read_budgets(
    epsilon: Any, delta: Any, records: Any, levels: Mapping[str, float], problems: list[str]
) -> dict[str, BudgetColumn]:
    """Return the columns by name, except those that were not given or cannot be used.

    `epsilon` may be a table. The `records` argument then takes precedence over the table's column.
    The table's deltas are returned under the key `OWN_DELTA`. They take precedence over `delta`,
    which applies to owners without a delta in the table.
    """
    if hasattr(epsilon, "columns") and hasattr(epsilon, "to_dict"):  # a DataFrame
        pairs = [(str(name), as_array(epsilon[name])) for name in epsilon.columns]
        columns = _read_table(pairs, range(len(epsilon)), "the table", problems)
    elif isinstance(epsilon, str | os.PathLike) and epsilon not in levels:
        columns = _read_file(Path(epsilon), problems)
    else:
        columns = _read_argument("epsilon", epsilon, problems)
    columns = {OWN_DELTA if what == "delta" else what: columns[what] for what in columns}
    columns |= _read_argument("delta", DEFAULT_DELTA if delta is None else delta, problems)
    if records is not None:
        columns |= _read_argument("records", records, problems)
    return columns


def reworded(problems: Sequence[str], levels: str, records: str) -> list[str]:
    """Return the problems with their advice reworded for command-line users."""
    return [text.replace(GIVE_LEVELS, levels).replace(GIVE_RECORDS, records) for text in problems]


def read_levels(levels: Mapping[str, float] | None, problems: list[str]) -> dict[str, float]:
    """Return the epsilon for each level."""
    meaning: dict[str, float] = {}
    for name, given in (levels or {}).items():
        if not isinstance(name, str) or _number(name, {}) is not None:
            problems.append(
                f"level {name!r} can be mistaken for a number; expected a name like 'high'"
            )
            continue
        value = _number(given, {})
        if value is None or not 0 < value < math.inf:
            problems.append(f"level {name!r} is set to {given!r}; {_EXPECTED['epsilon']}")
            value = 1.0  # so that its owners are not reported as well
        meaning[name] = value
    return meaning


def _number(cell: Any, levels: Mapping[str, float]) -> float | None:
    if isinstance(cell, str) and cell in levels:
        return levels[cell]
    if isinstance(cell, bool | np.bool_):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _read_argument(what: str, given: Any, problems: list[str]) -> dict[str, BudgetColumn]:
    """Return the column for a number, an array, a mapping or a Series."""
    if isinstance(given, Mapping):
        names, cells = as_array(given.keys()), as_array(given.values())
        return _keyed({what: cells}, names, None, f"the mapping {what}", problems)
    cells = as_array(given)
    if cells.ndim > 1:
        problems.append(
            f"{what} has shape {cells.shape}; expected one dimension, with one value per owner"
        )
        return {}
    if hasattr(given, "to_numpy") and hasattr(given, "index"):  # a pandas Series
        names = as_array(given.index)
        if not np.array_equal(names, np.arange(len(names))):  # a default index does not name owners
            return _keyed({what: cells}, names, None, f"the index of {what}", problems)
    return {what: BudgetColumn(what, cells, what)}


def _keyed(
    columns: Mapping[str, np.ndarray],
    names: np.ndarray,
    rows: Sequence[int] | None,
    where: str,
    problems: list[str],
) -> dict[str, BudgetColumn]:
    """Return columns that name the owner of each cell, sorted by owner if the names are valid."""
    numbers = None if rows is None else np.asarray(rows)
    place = (lambda at: f"entry {at}") if rows is None else (lambda at: f"row {rows[at]}")
    ids = as_ids(names, where, problems, place)
    if ids is None or len(ids) < len(names):
        return {what: BudgetColumn(what, columns[what], where, names, numbers) for what in columns}
    order = np.argsort(ids, kind="stable")
    names = ids = ids[order]
    repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
    if len(repeated):
        ids = np.unique(ids)
        problems.append(
            f"{where}: owner {name_some(repeated)} appears more than once; expected one entry per "
            "owner: remove the duplicates"
        )
    numbers = None if numbers is None else numbers[order]
    return {
        what: BudgetColumn(what, cells[order], where, names, numbers, ids)
        for what, cells in columns.items()
    }


def _read_table(
    pairs: Pairs, rows: Sequence[int], where: str, problems: list[str]
) -> dict[str, BudgetColumn]:
    names = [name.lower() for name, _ in pairs]
    unknown = [name for name, _ in pairs if name.lower() not in COLUMNS]
    lacking = [name for name in COLUMNS[:2] if name not in names]
    repeated = sorted({name for name in names if names.count(name) > 1})
    capital = [name for name, _ in pairs if name.lower() in COLUMNS and name not in COLUMNS]
    if capital:
        problems.append(
            f"{where}: column {name_some(capital)}: expected lower-case names; rename to "
            f"{name_some(capital, str.lower)}"
        )
    for what, wrong in (("unknown", unknown), ("no", lacking), ("more than one", repeated)):
        if wrong:
            problems.append(
                f"{where}: {what} column {name_some(wrong)}; expected owner, epsilon and, "
                "optionally, delta and records, each once: rename or remove columns"
            )
    columns = {name.lower(): cells for name, cells in pairs if name.lower() in COLUMNS}
    if "owner" not in columns or repeated:
        return {}
    if not len(rows):
        problems.append(HEADER_ALONE.format(where, "owner"))
        return {}
    return _keyed(columns, columns.pop("owner"), rows, where, problems)


def _read_file(path: Path, problems: list[str]) -> dict[str, BudgetColumn]:
    try:
        if path.suffix.lower() in PARQUET:
            pairs = parquet_columns(path)
            rows: Sequence[int] = range(len(pairs[0][1]) if pairs else 0)
        else:
            pairs, rows = _read_csv(path, problems)
    except OwnerwiseError as error:
        problems += error.problems
    except FileNotFoundError:
        problems.append(
            f"no file {path}; expected the path to a CSV or Parquet table (or, with levels=, the "
            "name of a level)"
        )
    except (OSError, ValueError, csv.Error) as error:
        problems.append(
            f"{path} cannot be read ({error}); expected CSV (UTF-8, comma-separated) or Parquet "
            "(named .parquet): export the table again"
        )
    else:
        return _read_table(pairs, rows, str(path), problems)
    return {}


def _read_csv(path: Path, problems: list[str]) -> tuple[Pairs, Sequence[int]]:
    cells: list[str] = []  # in one list: a million small lists would slow down garbage collection
    rows: list[int] = []
    misfits: list[str] = []
    if_empty = f"{path} is empty; expected a header (owner, epsilon) and rows"
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv_rows(file, path, if_empty)
        _, header = next(lines, (0, []))
        fillers = [{"owner": "", "delta": "1e-5"}.get(name, "1") for name in header]
        for line, row in lines:
            if len(row) != len(header):
                misfits.append(f"row {line} ({len(row)} cells)")
                row = [*row, *fillers[len(row) :]][: len(header)]
            cells += row
            rows.append(line)
    if misfits:
        problems.append(
            f"{path}, {name_some(misfits)}: expected {len(header)} cells, as in the header; fill "
            "in the row, and quote names that contain a comma"
        )
    pairs = [
        (name, _csv_column(name.lower(), cells[at :: len(header)]))
        for at, name in enumerate(header)
    ]
    return pairs, rows


def _csv_column(name: str, cells: list[str]) -> np.ndarray:
    """Return owners as ids; return other cells as numbers if all are numbers, else unchanged."""
    if name == "owner":
        return text_ids(cells)
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        return as_array(cells)
