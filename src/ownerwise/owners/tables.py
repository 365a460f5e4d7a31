"""Read tables: rows of CSV files, columns of Parquet files, and owner ids in both.

Cells are kept as written: the id "007" remains text, and an int column with missing cells does not
become floats.
"""

from __future__ import annotations

import csv
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ownerwise.errors import OwnerwiseError, name_some

PARQUET = (".parquet", ".pq")
"""File name suffixes of Parquet files."""

HEADER_ALONE = "{} has a header but no rows; expected one row per {}"
_OTHER_SEPARATOR = "{} seems to use {!r} as its separator; expected commas: export the table again"
_NEEDS_PYARROW = "{}: Parquet needs pyarrow: pip install 'ownerwise[table]', or use CSV"


def csv_rows(file: TextIO, path: Path, if_empty: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, stripped cells) for each row of a CSV file, skipping blank rows.

    `path` is named in messages; `if_empty` is the message for a file without any text.
    """
    first = next(filter(str.strip, file), None)
    if first is None:
        raise OwnerwiseError(if_empty)
    separator = next((mark for mark in ";\t" if mark in first), None)
    if "," not in first and separator is not None:
        raise OwnerwiseError(_OTHER_SEPARATOR.format(path, separator))
    file.seek(0)
    reader = csv.reader(file, skipinitialspace=True, strict=True)
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


def text_ids(cells: Sequence[str]) -> np.ndarray:
    """Return ids read from text, as ints if every cell is a canonical int (not "007")."""
    try:
        ids = np.array(list(map(int, cells)), dtype=np.int64)
    except (ValueError, OverflowError):
        return as_array(cells)
    return ids if list(map(str, ids.tolist())) == list(cells) else as_array(cells)


def as_array(given: Any) -> np.ndarray:
    """Return the cells as an array, keeping their types: [1, "a"] does not become two strings."""
    if hasattr(given, "detach"):  # a torch tensor
        given = given.detach().cpu()
    if hasattr(given, "to_numpy"):  # a column of a DataFrame
        return given.to_numpy()
    listed = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    if hasattr(given, "__array__") or not listed:
        return np.asarray(given)
    cells = list(given)
    if set(map(type, cells)) in ({int}, {float}):
        return np.array(cells)
    return np.fromiter(cells, dtype=object, count=len(cells))


def as_ids(
    given: np.ndarray,
    where: str,
    problems: list[str],
    place: Callable[[int], str] = "record {}".format,
) -> np.ndarray | None:
    """Return owner ids as int64 or str, without the missing ones; None if they cannot be used.

    `place` returns a description of a position, for use in messages.
    """
    if given.ndim != 1:
        problems.append(f"{where} has shape {given.shape}; expected a list of owner ids")
        return None
    if not len(given):
        problems.append(f"{where} is empty; expected at least one owner")
        return None
    cells = [] if given.dtype.kind in "iu" else given.tolist()
    missing = [at for at, cell in enumerate(cells) if is_missing(cell)]
    if missing:
        problems.append(
            f"{where}: no owner id in {name_some(missing, place)}; expected an int or a str in "
            "each: add the id, or leave out the entry"
        )
        given = np.delete(given, missing)
    types = set(map(type, given.tolist())) if given.dtype.kind == "O" else {given.dtype.type}
    kinds = sorted(set(map(_kind, types))) if len(given) else []
    if kinds == ["str"]:
        names = given.tolist()
        if wrong := [at for at, name in enumerate(names) if "\0" in name]:
            problems.append(
                f"{where}: the owner id in {name_some(wrong, place)} contains a NUL character, "
                "which numpy may drop; remove the character"
            )
            return None
        ids = given.astype(str)
        report_lookalikes(names, where, problems)
        return ids
    if kinds == ["int"] and max(int(given.max()), -1 - int(given.min())) < 2**63:
        return given.astype(np.int64)
    if kinds == ["int"]:
        problems.append(f"{where}: an owner id does not fit in 64 bits; use str ids instead")
    elif kinds:
        problems.append(
            f"{where}: owner ids are of type {' and '.join(kinds)}, such as "
            f"{given[:1].tolist()[0]!r}; expected all int or all str: convert them (missing "
            "values may have turned ints into floats)"
        )
    return None


def report_lookalikes(names: Iterable[str], where: str, problems: list[str]) -> None:
    """Report ids that differ only in invisible characters or in how letters are composed."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        groups.setdefault(_appearance(name), []).append(name)
    alike = [group for group in groups.values() if len(group) > 1]
    if alike:
        problems.append(
            f"{where}: owner ids {name_some(alike, lambda group: ' and '.join(map(ascii, group)))} "
            "look the same but differ in invisible characters, spaces or Unicode form; "
            "expected one spelling per owner: correct the ids"
        )


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)
"""Invisible characters: Unicode's Default_Ignorable code points and the Braille blank.

The categories Cc and Cf are not listed, because `_appearance` handles them."""


def _appearance(name: str) -> str:
    """Return the text as a reader sees it: NFKC form, no invisible characters, single spaces."""
    if not (name.isascii() and name.isprintable()):
        # removed first, because an invisible character between two letters prevents composition
        name = unicodedata.normalize("NFKC", _UNSEEN.sub("", name))
        hidden = [letter for letter in set(name) if unicodedata.category(letter) in ("Cc", "Cf")]
        name = name.translate({ord(letter): " " if letter.isspace() else "" for letter in hidden})
    return " ".join(name.split())


def is_missing(cell: Any) -> bool:
    """Return whether a cell is blank: "", NaN, None, or a pandas missing value."""
    if isinstance(cell, str):
        return not cell
    if isinstance(cell, float | np.floating):
        return math.isnan(cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def _kind(cell_type: type) -> str:
    if issubclass(cell_type, bool | np.bool_):
        return "bool"
    if issubclass(cell_type, int | np.integer):
        return "int"
    if issubclass(cell_type, float | np.floating):
        return "float"
    return "str" if issubclass(cell_type, str) else cell_type.__name__
