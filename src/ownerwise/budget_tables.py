"""Budget tables from DataFrames, CSV and Parquet files: `owner, epsilon[, delta][, records]`."""

from __future__ import annotations

import csv
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import BudgetError

COLUMNS = ("owner", "epsilon", "delta", "records")


@dataclass
class BudgetTable:
    """Columns of a budget table, and what is wrong with them."""

    columns: dict[str, list[Any]]
    problems: list[str] = field(default_factory=list)

    def as_mapping(self, column: str) -> dict[Any, Any] | None:
        """Return {owner: value} of a column, or None where the table lacks it."""
        if column not in self.columns:
            return None
        return dict(zip(self.columns["owner"], self.columns[column], strict=True))


def read_table(source: Any) -> BudgetTable | None:
    """Return the table that `source` is or names; None if it is no table (a mapping, an array)."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise BudgetError(f"no budget table at {path}; expected a CSV or Parquet file")
        if path.suffix.lower() in (".parquet", ".pq"):
            return _check(_read_parquet(path), str(path))
        return _check(_read_csv(path), str(path))
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # a DataFrame
        return _check({str(name): source[name].tolist() for name in source.columns}, "the table")
    return None


def _read_csv(path: Path) -> dict[str, list[Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    if not rows:
        raise BudgetError(f"{path} is empty; expected a header {','.join(COLUMNS[:2])} and rows")
    header = [name.strip() for name in rows[0]]
    wrong = [number for number, row in enumerate(rows[1:], 2) if len(row) != len(header)]
    if wrong:
        raise BudgetError(
            f"{path}, row {wrong[0]}: {len(rows[wrong[0] - 1])} cells under a header of "
            f"{len(header)}; expected as many cells as column names"
        )
    columns = {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(header)}
    owners = columns.get("owner", [])
    if owners and all(_is_plain_integer(name) for name in owners):
        columns["owner"] = [int(name) for name in owners]
    for name in ("delta", "records"):
        if name in columns:
            columns[name] = [_number(path, name, cell) for cell in columns[name]]
    return columns


def _is_plain_integer(text: str) -> bool:
    """Return whether text is an integer as one would write it: '007' is a name."""
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and (digits == "0" or not digits.startswith("0"))


def _number(path: Path, column: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise BudgetError(f"{path}: {cell!r} in column {column}; expected a number") from None


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise BudgetError(
            f"{path}: reading Parquet needs pyarrow; install ownerwise[table], or use CSV"
        ) from None
    return parquet.read_table(path).to_pydict()


def _check(columns: dict[str, list[Any]], where: str) -> BudgetTable:
    table = BudgetTable(columns)
    missing = [name for name in COLUMNS[:2] if name not in columns]
    unknown = [name for name in columns if name not in COLUMNS]
    if missing or unknown:
        raise BudgetError(
            f"{where} has the columns {', '.join(columns) or 'none'}; expected owner, epsilon and, "
            "optionally, delta and records"
        )
    owners = columns["owner"]
    if not owners:
        raise BudgetError(f"{where} has no rows; expected one row per owner")
    blank = sum(
        name is None or name == "" or (isinstance(name, float) and np.isnan(name))
        for name in owners
    )
    if blank:
        table.problems.append(
            f"{where}: {blank} rows without an owner id; expected one in each row"
        )
    twice = [name for name, count in Counter(map(str, owners)).items() if count > 1]
    if twice:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        table.problems.append(
            f"{where}: owner {', '.join(twice[:3])}{more} stands in more than one row; expected "
            "each owner once"
        )
    return table
