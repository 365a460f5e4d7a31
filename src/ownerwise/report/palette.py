"""The colours of the report, for figures that are drawn elsewhere: `assets/report.css` states them.

Series are numbered as in `plots`: 0 is a baseline, 1 and up are methods.
"""

from __future__ import annotations

import re
from importlib import resources

SERIES = 7


def palette(theme: str = "light") -> dict[str, str]:
    """Return the colours of a theme, "light" or "dark", by name: "ink", "grid", "series-0", ..."""
    style = resources.files("ownerwise.report").joinpath("assets", "report.css").read_text("utf-8")
    selector = ":root" if theme == "light" else f':root[data-theme="{theme}"]'
    block = style.split(f"{selector} {{")[1].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))


def series(theme: str = "light") -> list[str]:
    """Return the colours of the series, in order."""
    colours = palette(theme)
    return [colours[f"series-{number}"] for number in range(SERIES)]
