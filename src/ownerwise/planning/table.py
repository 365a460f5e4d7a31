"""The rows of a plan as a human-readable table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ownerwise.errors import printable
from ownerwise.planning.budget_classes import MORE, NOT_COMPUTED, BudgetClass, Range
from ownerwise.wording import up

_HEADINGS = (
    "records", "epsilon/{}", "delta", "rate", "clip norm", "multiplier", "batch share", "spent/{}",
)  # fmt: skip


def format_rows(
    rows: Sequence[BudgetClass], *, by_owner: bool, unit: str, other_unit: str | None
) -> list[str]:
    """Return the lines of a table with one row per owner, or per budget class.

    Budgets and what is spent are figures per unit. With `other_unit`, the last column is for that
    unit.
    """
    cells = [
        ["owner" if by_owner else "owners", *(heading.format(unit) for heading in _HEADINGS)],
        *map(_cells, rows),
    ]
    if other_unit is not None:
        figures = (epsilon_words(row.epsilon_per(other_unit)) for row in rows)
        for line, figure in zip(cells, [f"per {other_unit}", *figures], strict=True):
            line.append(figure)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cells(row: BudgetClass) -> list[str]:
    return [
        str(row.owners) if row.owner is None else printable(row.owner),
        str(row.records),
        _span(row.epsilon, "{:.4g}"),
        _span(row.delta, "{:.1e}"),
        _span(row.sampling_rate, "{:.4g}"),
        _span(row.clip_norm, "{:.4g}"),
        _span(row.noise_multiplier, "{:.4g}"),
        f"{100 * row.batch_share:.1f}%",
        _spent(row.epsilon_spent),
    ]


def epsilon_words(values: Range) -> str:
    """Return a range of epsilon, rounded up, in words: "4 to more than 100"."""
    low, high = (
        NOT_COMPUTED if math.isnan(value) else MORE if math.isinf(value) else up(value, 4)
        for value in values
    )
    return low if low == high else f"{low} to {high}"


def owner_statement(epsilon: np.ndarray, name: str = "epsilon") -> str:
    """Return a sentence with the largest epsilon of all records of an owner together."""
    known = epsilon[~np.isnan(epsilon)]
    missing = len(epsilon) - len(known)
    together = "For all records of one owner together"
    words = ""
    if len(known):
        largest = float(known.max())
        verb = "is up to" if math.isfinite(largest) else "reaches"
        words = f"{together}, {name} {verb} {epsilon_words((largest, largest))}."
    if missing:
        owners = "1 owner" if missing == 1 else f"{missing} owners"
        words += f" {together}, {name} could not be computed for {owners}."
    return words.strip()


def _spent(values: Range) -> str:
    """Return spent epsilons, rounded up to four decimal places."""
    low, high = (math.ceil(1e4 * value - 1e-8) / 1e4 for value in values)
    return _span((low, high), "{:.4f}")


def _span(values: Range, form: str) -> str:
    low, high = (form.format(value) for value in values)
    return low if low == high else f"{low} to {high}"
