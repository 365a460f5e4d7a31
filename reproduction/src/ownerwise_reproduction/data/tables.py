"""Read tables in their publishers' formats, such as workbooks with fixed headers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xlrd

from ownerwise.data.reading import reading
from ownerwise.errors import OwnerwiseError, name_some


def read_sheet(path: Path, sheet: str) -> list[list[Any]]:
    """Return the rows of a sheet in an Excel workbook (.xls); cells are text, float or ""."""
    with reading(path, f"an Excel workbook with a sheet {sheet!r}"):
        cells = xlrd.open_workbook(str(path), logfile=io.StringIO()).sheet_by_name(sheet)
        return [list(cells.row_values(row)) for row in range(cells.nrows)]


def whole_numbers(path: Path, cells: Sequence[Any]) -> np.ndarray:
    """Return a column of whole numbers as int64."""
    with reading(path, "a column of whole numbers"):
        return np.array(cells, dtype=np.int64)


def expect_header(path: Path, header: Sequence[str], expected: Sequence[str]) -> None:
    """Raise an error if a table does not have the expected columns."""
    if list(header) != list(expected):
        raise OwnerwiseError(
            f"{path} has the columns {name_some(list(header), repr)}; expected "
            f"{name_some(list(expected), repr)}: this is a different file"
        )
