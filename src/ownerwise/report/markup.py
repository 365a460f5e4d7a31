"""HTML elements. All text, including user-chosen names, is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ownerwise.errors import printable
from ownerwise.report.plots import Figure, LegendEntry, Panel


class Cell(NamedTuple):
    """A table cell; `best` adds a star, and `markup` is HTML to show instead of the text."""

    text: str = ""
    best: bool = False
    markup: str = ""


def escape(value: object) -> str:
    """Return text that is safe inside HTML elements and attributes."""
    lines = str(value).split("\n")
    return html.escape("\n".join(map(printable, lines)), quote=True)


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def bullets(items: Iterable[str]) -> str:
    """Return a list of plain-text items."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    words: int = 1,
) -> str:
    """Return a table with its own scroll bar; the first `words` columns are text."""
    head = "".join(
        f'<th scope="col"{_class("" if at < words else "number")}>{escape(name)}</th>'
        for at, name in enumerate(headings)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, at, words) for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><p class="caption">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _cell(cell: str | Cell, at: int, words: int) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    content = cell.markup or escape(cell.text)
    if at == 0:
        return f'<th scope="row">{content}</th>'
    kinds = " ".join(k for k, on in (("number", at >= words), ("best", cell.best)) if on)
    mark = '<span class="mark" role="img" aria-label="best mean">★</span>' if cell.best else ""
    return f"<td{_class(kinds)}>{mark}{content}</td>"


def details(summary: str, content: str) -> str:
    """Return content that is collapsed until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def section(identity: str, title: str, *content: str) -> str:
    """Return a section with a heading and an id to link to."""
    return (
        f'<section id="{identity}" aria-labelledby="{identity}-title">'
        f'<h2 id="{identity}-title">{escape(title)}</h2>{"".join(content)}</section>'
    )


def figure(chart: Figure) -> str:
    """Return the frame of a figure; the page's script draws the charts in it."""
    views = list(chart.panels[0].views)
    controls = _legend(chart.legend) + _switch(views)
    controls = f'<div class="controls">{controls}</div>{_chooser(chart)}' if controls else ""
    panels = "".join(
        _panel(chart, panel, f"{chart.name}-{at}") for at, panel in enumerate(chart.panels)
    )
    grid = "small" if chart.small else f"columns-{min(len(chart.panels), 2)}"
    return (
        f'<figure class="chart" data-figure="{chart.name}">{controls}'
        f'<div class="panels {grid}">{panels}</div>'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _panel(chart: Figure, panel: Panel, key: str) -> str:
    title = f"<h3>{escape(panel.title)}</h3>" if panel.title else ""
    hidden = "" if panel.shown else " hidden"
    return (
        f'<div class="panel" data-panel="{key}"{hidden}>{title}<div class="plot" id="{key}" '
        f'role="img" aria-label="{escape(panel.description)}" style="height:{chart.height}px">'
        "</div></div>"
    )


def _legend(entries: Sequence[LegendEntry]) -> str:
    if not entries:
        return ""
    buttons = "".join(
        '<button type="button" class="key" aria-pressed="true" '
        f'data-series="{escape(entry.series)}">'
        f'<svg width="30" height="10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" '
        f'data-colour="{entry.colour}" stroke-width="3" stroke-dasharray="{_STROKES[entry.dash]}"/>'
        f"</svg>{escape(entry.label)}</button>"
        for entry in entries
    )
    return f'<div class="legend" role="group" aria-label="Show or hide">{buttons}</div>'


_STROKES = {
    "solid": "none",
    "dash": "7 4",
    "dot": "2 3",
    "dashdot": "7 3 2 3",
    "longdash": "11 4",
}


def _switch(views: Sequence[str]) -> str:
    if len(views) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-view="{escape(view)}" '
        f'aria-pressed="{"true" if at == 0 else "false"}">{escape(view)}</button>'
        for at, view in enumerate(views)
    )
    return f'<div class="switch" role="group" aria-label="Quantity drawn">{buttons}</div>'


def _chooser(chart: Figure) -> str:
    shown = sum(panel.shown for panel in chart.panels)
    if shown == len(chart.panels):
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" data-shows="{chart.name}-{at}"'
        f"{' checked' if panel.shown else ''}>{escape(panel.title)}</label>"
        for at, panel in enumerate(chart.panels)
    )
    return (
        f'<details class="chooser"><summary>Choose groups (<span class="count">{shown}</span> of '
        f"{len(chart.panels)} shown; by default the strictest, worst and laxest)</summary>"
        f'<div class="boxes">{boxes}</div></details>'
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
