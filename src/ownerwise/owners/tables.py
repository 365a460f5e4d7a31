"""Read tables: rows of CSV files, columns of Parquet files, and cells of files and arrays.

Cells are kept as written: an int column with missing cells does not become floats.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ownerwise.errors import OwnerwiseError

PARQUET = (".parquet", ".pq")
"""File name suffixes of Parquet files."""

HEADER_ALONE = "{} has a header but no rows; expected one row per {}"
_NEEDS_PYARROW = "{}: Parquet needs pyarrow: pip install 'ownerwise[table]', or use CSV"


def csv_rows(file: TextIO, path: Path, if_empty: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) for each row of a CSV file, skipping blank rows.

    Cells are separated by commas. If the first line has none, by semicolons or tabs if it has some:
    programs write semicolons where numbers are written with a decimal comma.
    `path` is named in messages; `if_empty` is the message for a file without any text.
    """
    first = next(filter(str.strip, file), None)
    if first is None:
        raise OwnerwiseError(if_empty)
    separator = next((mark for mark in ",;\t" if mark in first), ",")
    file.seek(0)
    reader = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
    for row in filter(any, reader):
        yield reader.line_num, list(map(str.strip, row))


def parquet_columns(path: Path) -> list[tuple[str, np.ndarray]]:
    """Return the columns of a Parquet file as (name, cells) pairs."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise OwnerwiseError(_NEEDS_PYARROW.format(path)) from None
    with ParquetFile(path) as file:
        table = file.read()
    return [
        (name, _parquet_cells(cells))
        for name, cells in zip(table.column_names, table.columns, strict=True)
    ]


def _parquet_cells(cells: Any) -> np.ndarray:
    """Return a column in a form that does not depend on whether other cells are missing.

    With missing cells, to_numpy would turn ints into floats. Without missing cells, it would turn
    times into ints and lists into arrays, which have a different text form.
    """
    array = None if cells.null_count else cells.to_numpy()
    if array is not None and array.dtype.kind in "biuf":
        return array
    return as_array(cells.to_pylist())


def as_array(given: Any) -> np.ndarray:
    """Return the cells as an array, keeping their types: [1, "a"] does not become two strings."""
    if hasattr(given, "detach"):  # a torch tensor
        given = given.detach().cpu()
    if hasattr(given, "to_numpy"):  # a column of a DataFrame
        return given.to_numpy()
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    if hasattr(given, "__array__") or not listed:
        return np.asarray(given)
    cells = list(given)
    if set(map(type, cells)) in ({int}, {float}):
        return np.array(cells)
    return np.fromiter(cells, dtype=object, count=len(cells))


def is_missing(cell: Any) -> bool:
    """Return whether a cell is blank: "", NaN, None, or a pandas missing value."""
    if isinstance(cell, str):
        return not cell
    if isinstance(cell, float | np.floating):
        return math.isnan(cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def plain_number(cell: Any) -> float:
    """Return a cell as a number; raise ValueError or TypeError if it is not one.

    Text must use ASCII digits without underscores: Python would read "0_5" as 5.
    """
    if isinstance(cell, bytes | bytearray | memoryview):
        raise TypeError("text as bytes")
    if isinstance(cell, str) and ("_" in cell or not cell.isascii()):
        raise ValueError(cell)
    return float(cell)
