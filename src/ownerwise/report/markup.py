"""Pieces of HTML: every name that a user gave is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ownerwise.report.plots import Figure, Key, Panel


class Cell(NamedTuple):
    """A table cell: `best` marks it, `markup` is ready-made HTML instead of text."""

    text: str = ""
    best: bool = False
    markup: str = ""


def escape(value: object) -> str:
    """Return text that is safe within HTML and within its attributes."""
    return html.escape(str(value), quote=True)


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def bullets(items: Iterable[str]) -> str:
    """Return a list of plain texts."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    words: int = 1,
) -> str:
    """Return a table that scrolls within itself; the first `words` columns are text."""
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
    """Return content that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def section(identity: str, title: str, *content: str) -> str:
    """Return a section with a heading that the navigation can reach."""
    return (
        f'<section id="{identity}" aria-labelledby="{identity}-title">'
        f'<h2 id="{identity}-title">{escape(title)}</h2>{"".join(content)}</section>'
    )


def figure(made: Figure) -> str:
    """Return the frame of a figure; the page's script draws into it."""
    views = list(made.panels[0].views)
    controls = _legend(made.keys) + _switch(views)
    controls = f'<div class="controls">{controls}</div>{_chooser(made)}' if controls else ""
    panels = "".join(
        _panel(made, panel, f"{made.name}-{at}") for at, panel in enumerate(made.panels)
    )
    grid = "small" if made.small else f"columns-{min(len(made.panels), 2)}"
    return (
        f'<figure class="chart" data-figure="{made.name}">{controls}'
        f'<div class="panels {grid}">{panels}</div>'
        f"<figcaption>{escape(made.caption)}</figcaption></figure>"
    )


def _panel(made: Figure, panel: Panel, key: str) -> str:
    title = f"<h3>{escape(panel.title)}</h3>" if panel.title else ""
    hidden = "" if panel.shown else " hidden"
    return (
        f'<div class="panel" data-panel="{key}"{hidden}>{title}<div class="plot" id="{key}" '
        f'role="img" aria-label="{escape(panel.description)}" style="height:{made.height}px">'
        "</div></div>"
    )


def _legend(keys: Sequence[Key]) -> str:
    if not keys:
        return ""
    buttons = "".join(
        f'<button type="button" class="key" aria-pressed="true" data-series="{escape(key.series)}">'
        f'<svg width="30" height="10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" '
        f'data-colour="{key.colour}" stroke-width="3" stroke-dasharray="{_STROKES[key.dash]}"/>'
        f"</svg>{escape(key.label)}</button>"
        for key in keys
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
    return f'<div class="switch" role="group" aria-label="What is drawn">{buttons}</div>'


def _chooser(made: Figure) -> str:
    shown = sum(panel.shown for panel in made.panels)
    if shown == len(made.panels):
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" data-shows="{made.name}-{at}"'
        f"{' checked' if panel.shown else ''}>{escape(panel.title)}</label>"
        for at, panel in enumerate(made.panels)
    )
    return (
        f'<details class="chooser"><summary>Choose groups (<span class="count">{shown}</span> of '
        f"{len(made.panels)} shown: the strictest, the laxest and the worst come first)</summary>"
        f'<div class="boxes">{boxes}</div></details>'
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
