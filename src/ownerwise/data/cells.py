"""Read single cells of a table as numbers, dates or codes, by declared rules.

Every rule is public and applies to one cell at a time: what a cell is read as never depends on the
other cells of its column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from ownerwise.owners import plain_number
from ownerwise.wording import name_of

MISSING = ("", "?", None)
_WHOLE = re.compile(r"-?\d+\.0+")
_DAY = 86_400.0  # seconds


def code_of(cell: Any) -> str:
    """Return a cell as the name of a category: 1, 1.0, "1" and "1.0" are the same code.

    Leading zeros are kept: "01" is not "1".
    """
    text = name_of(cell.item() if isinstance(cell, np.generic) else cell).strip()
    return text.partition(".")[0] if _WHOLE.fullmatch(text) else text


def missing_test(codes: Sequence[Any]) -> Callable[[Any], bool]:
    """Return the function that tells whether a cell is missing, given additional missing codes."""
    known = {code_of(code) for code in codes}

    def is_missing(cell: Any) -> bool:
        if cell in MISSING or (isinstance(cell, float | np.floating) and math.isnan(cell)):
            return True
        if isinstance(cell, np.datetime64 | np.timedelta64):
            return bool(np.isnat(cell))
        return bool(known) and code_of(cell) in known

    return is_missing


def number_of(cell: Any, unit: str = "", decimal: str = ".") -> float:
    """Return a cell as a number; raise ValueError or TypeError if it is not one.

    Args:
        cell: a number, or text such as "82", "82 kg" or "1,5".
        unit: the unit that may follow the number; another unit is an error.
        decimal: "." or ","; the other one is an error, because it may separate thousands.
    """
    if not isinstance(cell, str):
        return plain_number(cell)
    text = cell.strip()
    if unit and text.endswith(unit):
        text = text.removesuffix(unit)
        if unit[0].isdigit() and not text.endswith(" "):  # "10^9/l" after a digit
            raise ValueError(cell)
        text = text.rstrip()
    if decimal == ",":
        if "." in text:
            raise ValueError(cell)
        text = text.replace(",", ".")
    return plain_number(text)


def day_of(cell: Any, form: str = "") -> float:
    """Return a date, or a date with a time, as a number of days; raise an error if it is none.

    Args:
        cell: text, or a date or datetime object. A time zone counts; without one, UTC is assumed.
        form: how dates are written, as for `datetime.strptime`; by default ISO 8601.
    """
    if isinstance(cell, np.datetime64):
        cell = cell.astype("datetime64[us]").item()
    if isinstance(cell, str):
        text = cell.strip()
        cell = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
    if not isinstance(cell, date):
        raise TypeError("not a date")
    if not isinstance(cell, datetime):
        cell = datetime(cell.year, cell.month, cell.day)
    zoned = cell if cell.tzinfo else cell.replace(tzinfo=UTC)
    return (zoned - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / _DAY
