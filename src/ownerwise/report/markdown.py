"""Markdown: tables and escaped text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ownerwise.errors import printable


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table; all columns after the first `texts` contain right-aligned numbers."""
    rule = ["---"] * texts + ["---:"] * (len(header) - texts)
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(value: object) -> str:
    """Return the text on one line, escaped so that Markdown shows it literally."""
    text = printable(" ".join(str(value).split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#>])", r"\\\1", text)
