"""Read budgets from mappings, arrays, DataFrames, and CSV and Parquet files.

Every source becomes a `BudgetTable`: the cells as given, and where each came from. A table in a
file or a DataFrame has the columns `owner, epsilon[, delta][, records]` and one row per owner; a
delta may be left blank. Values are checked later (`values`, `matching`). Reading does not stop at
the first problem: each one is collected, and reading continues with what remains.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import Problems, did_you_mean, name_some
from ownerwise.owners.hints import Hints
from ownerwise.owners.ids import as_ids, text_ids
from ownerwise.owners.tables import (
    HEADER_ALONE,
    PARQUET,
    as_array,
    csv_rows,
    parquet_columns,
    plain_number,
)

COLUMNS = ("owner", "epsilon", "delta", "records")
DEFAULT_DELTA = 1e-5
Pairs = Sequence[tuple[str, np.ndarray]]
"""The columns of a file or a DataFrame, as (name, cells) pairs."""


@dataclass(frozen=True, eq=False)
class BudgetTable:
    """Budgets from one source, as given.

    Attributes:
        where: the source, as named in messages.
        columns: the cells for "epsilon", "delta" and "records", if the source has them: [rows], or
            [] for a single value for all owners.
        names: the owner of each row, as given; None if the rows are in the order of the sorted
            owner ids.
        lines: the line or row number of each row; None if the source is not a table.
        ids: the distinct names, sorted, as int64 or str; the rows are then in the same order. None
            if no names were given, or some of them are invalid.
    """

    where: str
    columns: dict[str, np.ndarray]
    names: np.ndarray | None = None
    lines: np.ndarray | None = None
    ids: np.ndarray | None = None

    def place(self, row: int) -> str:
        """Return the name of a row, for messages."""
        return f"entry {row}" if self.lines is None else f"row {self.lines[row]}"

    def sorted_by_owner(self, problems: Problems) -> BudgetTable:
        """Return the table sorted by owner, with its ids, if all names are valid."""
        ids = None if self.names is None else as_ids(self.names, self.where, problems, self.place)
        if self.names is None or ids is None or len(ids) < len(self.names):
            return self
        order = np.argsort(ids, kind="stable")
        names = ids[order]
        ids = names
        repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if len(repeated):
            ids = np.unique(ids)
            problems.add(
                f"{self.where}: owner {name_some(repeated)} appears more than once; expected one "
                "entry per owner: remove the duplicates"
            )
        columns = {what: cells[order] for what, cells in self.columns.items()}
        lines = None if self.lines is None else self.lines[order]
        return BudgetTable(self.where, columns, names, lines, ids)


def read_budgets(
    epsilon: Any,
    delta: Any,
    records: Any,
    levels: Container[Any],
    hints: Hints,
    problems: Problems,
) -> list[BudgetTable]:
    """Return the budgets from each argument: epsilon, which may be a table, delta and records.

    The deltas in a table take precedence over `delta`, which fills the gaps. The `records` argument
    takes precedence over the table's column, which is then ignored.
    """
    if hasattr(epsilon, "columns") and hasattr(epsilon, "to_dict"):  # a DataFrame
        cells = [(str(name), as_array(epsilon[name])) for name in epsilon.columns]
        table = _from_columns("the table", cells, np.arange(len(epsilon)), problems)
    elif isinstance(epsilon, str | os.PathLike) and epsilon not in levels:
        level = f", or the name of a level ({hints.levels})" if isinstance(epsilon, str) else ""
        table = _read_file(Path(epsilon), level, problems)
    else:
        table = _read_argument("epsilon", epsilon, problems)
    delta = DEFAULT_DELTA if delta is None else delta
    tables = [table, _read_argument("delta", delta, problems)]
    if records is not None:
        table.columns.pop("records", None)
        tables.append(_read_argument("records", records, problems))
    return [table.sorted_by_owner(problems) for table in tables]


def _read_argument(what: str, given: Any, problems: Problems) -> BudgetTable:
    """Return the table for a number, an array, a mapping or a Series."""
    if isinstance(given, Mapping):
        cells = as_array(given.values())
        return BudgetTable(f"the mapping {what}", {what: cells}, as_array(given.keys()))
    cells = as_array(given)
    if cells.ndim > 1:
        problems.add(
            f"{what} has shape {cells.shape}; expected one dimension, with one value per owner"
        )
        return BudgetTable(what, {})
    if hasattr(given, "to_numpy") and hasattr(given, "index"):  # a pandas Series
        names = as_array(given.index)
        if not np.array_equal(names, np.arange(len(names))):  # a default index does not name owners
            return BudgetTable(f"the index of {what}", {what: cells}, names)
    return BudgetTable(what, {what: cells})


def _read_file(path: Path, or_level: str, problems: Problems) -> BudgetTable:
    """Read a table from a file."""
    try:
        with problems.guard():
            if path.suffix.lower() in PARQUET:
                cells = parquet_columns(path)
                lines = np.arange(len(cells[0][1]) if cells else 0)
            else:
                cells, lines = _read_csv(path, problems)
            return _from_columns(str(path), cells, lines, problems)
    except FileNotFoundError:
        problems.add(f"no file {path}; expected the path to a CSV or Parquet table{or_level}")
    except (OSError, ValueError, csv.Error) as error:
        problems.add(
            f"{path} cannot be read ({error}); expected CSV (UTF-8, comma-separated) or Parquet "
            "(named .parquet): export the table again"
        )
    return BudgetTable(str(path), {})


def _from_columns(where: str, pairs: Pairs, lines: np.ndarray, problems: Problems) -> BudgetTable:
    """Return the table with these columns, and report unexpected or missing column names."""
    names = [name.lower() for name, _ in pairs]
    absent = [name for name in COLUMNS if name not in names]
    unknown = [
        f"{name} ({hint})" if (hint := did_you_mean(name, absent)) else name
        for name, _ in pairs
        if name.lower() not in COLUMNS
    ]
    lacking = [name for name in COLUMNS[:2] if name in absent]
    repeated = sorted({name for name in names if names.count(name) > 1})
    capital = [name for name, _ in pairs if name.lower() in COLUMNS and name not in COLUMNS]
    if capital:
        problems.add(
            f"{where}: column {name_some(capital)}: expected lower-case names; rename to "
            f"{name_some(capital, str.lower)}"
        )
    for what, wrong in (("unknown", unknown), ("no", lacking), ("more than one", repeated)):
        if wrong:
            problems.add(
                f"{where}: {what} column {name_some(wrong)}; expected owner, epsilon and, "
                "optionally, delta and records, each once: rename or remove columns"
            )
    columns = {name.lower(): cells for name, cells in pairs if name.lower() in COLUMNS}
    if "owner" not in columns or repeated:
        return BudgetTable(where, {})
    if not len(lines):
        problems.add(HEADER_ALONE.format(where, "owner"))
        return BudgetTable(where, {})
    owners = columns.pop("owner")
    return BudgetTable(where, columns, owners, lines)


def _read_csv(path: Path, problems: Problems) -> tuple[Pairs, np.ndarray]:
    """Return the columns, and the line of each row."""
    cells: list[str] = []  # in one list: a million small lists would slow down garbage collection
    numbers: list[int] = []
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
            numbers.append(line)
    if misfits:
        problems.add(
            f"{path}, {name_some(misfits)}: expected {len(header)} cells, as in the header; fill "
            "in the row, and quote names that contain a comma"
        )
    pairs = [
        (name, _csv_column(name.lower(), cells[at :: len(header)]))
        for at, name in enumerate(header)
    ]
    return pairs, np.array(numbers)


def _csv_column(name: str, cells: list[str]) -> np.ndarray:
    """Return owners as ids; return other cells as numbers if all are numbers, else unchanged."""
    if name == "owner":
        return text_ids(cells)
    try:
        return np.array(list(map(plain_number, cells)))
    except ValueError:
        return as_array(cells)
