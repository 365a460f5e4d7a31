"""Check the values in a budget table: epsilon, delta, numbers of records, and named levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ownerwise.errors import Problems, name_some
from ownerwise.owners.budget_tables import BudgetTable
from ownerwise.owners.hints import Hints
from ownerwise.owners.tables import is_missing, plain_number

_VALID: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "epsilon": lambda values: np.isfinite(values) & (values > 0),
    "delta": lambda values: (values > 0) & (values < 1),
    "records": lambda values: (values >= 0) & (values < 2**53) & (values == np.floor(values)),
}
_EXPECTED = {
    "epsilon": "expected a positive, finite number (typically 0.1 to 10)",
    "delta": "expected a number above 0 and below 1, well below 1/records (typically 1e-5)",
    "records": "expected a whole number of at least 1, or 0 for a plan with unit='owner'",
}


def read_levels(levels: Mapping[str, float] | None, problems: Problems) -> dict[str, float]:
    """Return the epsilon for each level."""
    meaning: dict[str, float] = {}
    for name, given in (levels or {}).items():
        if not isinstance(name, str) or _number(name, {}) is not None:
            problems.add(
                f"level {name!r} can be mistaken for a number; expected a name like 'high'"
            )
            continue
        value = _number(given, {})
        if value is None or not 0 < value < math.inf:
            problems.add(f"level {name!r} is set to {given!r}; {_EXPECTED['epsilon']}")
            value = 1.0  # so that its owners are not reported as well
        meaning[name] = value
    return meaning


def read_numbers(
    table: BudgetTable,
    ids: np.ndarray | None,
    levels: Mapping[str, float],
    hints: Hints,
    problems: Problems,
) -> dict[str, np.ndarray]:
    """Return the columns as float64, in the same shapes, and report every invalid value.

    `ids` names the owners if the table does not. A blank delta in a table becomes NaN.
    """
    known = name_some(list(levels), shown=10) or f"none; {hints.levels}"
    numbers = {}
    for what, given in table.columns.items():
        values, unreadable = _as_floats(given.ravel(), levels if what == "epsilon" else {})
        invalid = ~unreadable & ~_VALID[what](values)
        if what == "delta" and table.lines is not None:
            blank = [at for at in np.flatnonzero(unreadable | invalid) if is_missing(given[at])]
            unreadable[blank] = invalid[blank] = False
        expected = "not a number; enter a number for each owner"
        if what == "epsilon":
            expected = f"neither a number nor a known level; correct it (known levels: {known})"
        for wrong, advice in ((unreadable, expected), (invalid, _EXPECTED[what])):
            if wrong.any():
                problems.add(f"{what} of {_named(table, given, wrong, ids)}: {advice}")
        numbers[what] = values.reshape(given.shape)
    return numbers


def _as_floats(cells: np.ndarray, levels: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, and a mask of the cells that cannot be read as numbers."""
    if cells.dtype.kind in "iuf":
        return cells.astype(np.float64), np.zeros(len(cells), dtype=bool)
    read = [_number(cell, levels) for cell in cells.tolist()]
    return np.array(read, dtype=np.float64), np.array([number is None for number in read], bool)


def _named(table: BudgetTable, given: np.ndarray, wrong: np.ndarray, ids: np.ndarray | None) -> str:
    """Return the owners of the wrong cells, with the cells and where they came from."""
    if not given.ndim:
        return f"all owners ({given.tolist()!r})"

    def cell(row: int) -> str:
        (value,) = given[row : row + 1].tolist()
        return repr(value) if table.lines is None else f"{value!r}, {table.place(row)}"

    names = ids if table.names is None else table.names
    source = "" if table.lines is None else f" in {table.where}"
    rows = np.flatnonzero(wrong)
    if names is None or len(names) != len(given):
        return f"entry {name_some(rows, lambda row: f'{row} ({cell(row)})')}{source}"
    return f"owner {name_some(rows, lambda row: f'{names[row]} ({cell(row)})')}{source}"


def _number(cell: Any, levels: Mapping[str, float]) -> float | None:
    if isinstance(cell, str) and cell in levels:
        return levels[cell]
    if isinstance(cell, bool | np.bool_):
        return None
    try:
        return plain_number(cell)
    except (TypeError, ValueError, OverflowError):
        return None
