"""The targets of a table: numbers with a declared public range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.owners import plain_number


def range_problems(given: Any) -> list[str]:
    """Return a problem unless `given` is a range (low, high) of finite numbers, low < high."""
    numbers = isinstance(given, list | tuple) and len(given) == 2
    numbers = numbers and all(type(end) in (int, float) and math.isfinite(end) for end in given)
    if numbers and given[0] < given[1]:
        return []
    return [
        f"target_range {given!r}: expected two finite numbers, low < high, from public knowledge"
    ]


def numeric_targets(cells: Sequence[Any], target: str) -> np.ndarray:
    """Return a target column as float32 in its own units; refuse cells without a finite number."""
    values = np.full(len(cells), np.nan, dtype=np.float64)
    for at, cell in enumerate(cells):
        try:
            values[at] = plain_number(cell) if isinstance(cell, str) else float(cell)
        except (TypeError, ValueError):
            continue
    wrong = np.flatnonzero(~np.isfinite(values)).tolist()
    if wrong:
        raise OwnerwiseError(
            f"column {target}: no finite number in record {name_some(wrong)}; expected one in "
            "every record, because target_range declares the target as a number: correct the "
            "cell, or remove the record"
        )
    return values.astype(np.float32)
