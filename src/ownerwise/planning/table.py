"""The rows of a plan as a human-readable table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ownerwise.errors import printable
from ownerwise.planning.budget_classes import BudgetClass, Range

_HEADINGS = (
    "records", "epsilon", "delta", "rate", "clip norm", "multiplier", "batch share", "spent",
)  # fmt: skip


def format_rows(rows: Sequence[BudgetClass], *, by_owner: bool) -> list[str]:
    """Return the lines of a table with one row per owner, or per budget class."""
    cells = [("owner" if by_owner else "owners", *_HEADINGS), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cells(row: BudgetClass) -> tuple[str, ...]:
    return (
        str(row.owners) if row.owner is None else printable(row.owner),
        str(row.records),
        _span(row.epsilon, "{:.4g}"),
        _span(row.delta, "{:.1e}"),
        _span(row.sampling_rate, "{:.4g}"),
        _span(row.clip_norm, "{:.4g}"),
        _span(row.noise_multiplier, "{:.4g}"),
        f"{100 * row.batch_share:.1f}%",
        _span(_rounded_up(row.epsilon_spent), "{:.4f}"),
    )


def _rounded_up(values: Range) -> Range:
    """Return spent epsilons rounded up to four decimal places."""
    low, high = (math.ceil(1e4 * value - 1e-8) / 1e4 for value in values)
    return low, high


def _span(values: Range, form: str) -> str:
    low, high = (form.format(value) for value in values)
    return low if low == high else f"{low} to {high}"
