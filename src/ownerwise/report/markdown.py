"""Pieces of Markdown pages: tables and amounts over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.wording import Amount


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table; all columns but the first `texts` are numbers and stand to the right."""
    rule = ["---"] * texts + ["---:"] * (len(header) - texts)
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: Amount | None) -> str:
    """Return a share over seeds in per cent; nothing where there is none."""
    return "" if value is None else amount(value, 100)


def amount(value: Amount, factor: float = 1.0) -> str:
    """Return mean and deviation with two digits, both multiplied by a factor."""
    deviation = "" if value.deviation is None else f" ± {factor * value.deviation:.2f}"
    return f"{factor * value.mean:.2f}{deviation}"
