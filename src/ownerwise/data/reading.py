"""Read external files completely or not at all; errors name the corrupted file."""

from __future__ import annotations

import gzip
import io
import lzma
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.owners import csv_rows

_SPREADSHEETS = (".xls", ".xlsx", ".xlsm", ".ods")
_OPEN = {".gz": gzip.open, ".xz": lzma.open}


def unknown_type(path: Path, expected: str) -> OwnerwiseError:
    """Return the error for a file whose type no reader knows."""
    kind = path.suffix.lower()
    remedy = ": save the sheet as CSV, in UTF-8" if kind in _SPREADSHEETS else ""
    return OwnerwiseError(f"{path}: file type {kind!r}; expected {expected}{remedy}")


class Unusable(ValueError):
    """A problem found in a file by the library's own checks; its message never quotes a cell."""


@contextmanager
def reading(path: Path | str, expected: str) -> Iterator[None]:
    """If reading a file raises an error, raise one that names the file instead.

    The message of an `Unusable` error is kept. Messages from parsers are dropped, because they may
    quote cells.
    """
    try:
        yield
    except (OwnerwiseError, MemoryError):
        raise
    except Exception as error:  # parsers may raise almost any error on corrupted files
        if isinstance(error, UnicodeDecodeError):
            raise OwnerwiseError(
                f"{path} cannot be read as {expected}: it is not encoded in UTF-8. Export or save "
                "it again, with this encoding"
            ) from None
        what = str(error) if isinstance(error, Unusable) else type(error).__name__
        raise OwnerwiseError(
            f"{path} cannot be read as {expected} ({what}): it is corrupted, truncated or the "
            "wrong file; get a fresh copy"
        ) from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz or .xz."""
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        return file.read()  # type: ignore[return-value]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a NumPy archive (.npz); pickled arrays are rejected."""
    with (
        reading(path, "a NumPy archive"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return dict(arrays.items())


def read_rows(path: Path, columns: int | None = None) -> list[list[str]]:
    """Return the rows of a CSV file, stripping cells and omitting blank lines and `|` comments.

    Every row must have `columns` cells, by default as many as the first row.
    """
    with reading(path, "CSV"):
        file = io.StringIO(read_bytes(path).decode("utf-8-sig"), newline="")
        rows, misfits = [], []
        for line, row in csv_rows(file, path, f"{path} is empty (no rows); get a fresh copy"):
            if row[0].startswith("|"):
                continue
            columns = columns or len(row)
            if len(row) != columns:
                misfits.append(f"line {line} ({len(row)})")
            rows.append(row)
    if misfits:
        raise OwnerwiseError(
            f"{path}: expected {columns} cells in each line, found a different number in "
            f"{name_some(misfits)}; the file is corrupted, truncated or the wrong one: get a fresh "
            "copy"
        )
    if not rows:
        raise OwnerwiseError(f"{path} has no rows; get a fresh copy")
    return rows


def by_column(path: Path, rows: list[list[Any]], names: Sequence[str]) -> dict[str, tuple]:
    """Return the columns of a table by name."""
    with reading(path, f"a table with {len(names)} columns"):
        if not rows:
            raise Unusable("it has no rows")
        return dict(zip(names, zip(*rows, strict=True), strict=True))
