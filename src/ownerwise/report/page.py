"""The page: one self-contained file that makes no network connections."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources

from markupsafe import Markup

from ownerwise.errors import require
from ownerwise.report.blocks import Block, Section
from ownerwise.report.plots import TEMPLATE, Figure
from ownerwise.report.rendering import render_html


def page(
    title: str, sections: Sequence[tuple[Section, Sequence[Block]]], omitted: Sequence[str]
) -> str:
    """Return the whole document.

    The content security policy forbids all connections, and all scripts except the two embedded
    here: a user-chosen name could not run as code even if it were not escaped.

    Args:
        title: the heading of the page.
        sections: the sections, each with its content.
        omitted: the sections that are missing, with the reasons.
    """
    scripts = [plotly_script(), _asset("report.js")]
    figures = [block for _, blocks in sections for block in blocks if isinstance(block, Figure)]
    return render_html(
        "page.html.jinja",
        title=title,
        sections=sections,
        omitted=omitted,
        style=Markup(_asset("report.css")),
        charts=Markup(_data(figures)),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(_hash(script) for script in scripts)),
    )


def _data(figures: Sequence[Figure]) -> str:
    """Return all charts as JSON that cannot close the enclosing script element."""
    panels = {
        f"{figure.name}-{at}": {
            name: {"data": view.traces, "layout": view.layout} for name, view in panel.views.items()
        }
        for figure in figures
        for at, panel in enumerate(figure.panels)
    }
    content = {"template": TEMPLATE, "panels": panels}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def plotly_script() -> str:
    """Return plotly's JavaScript; if it is missing, raise an error that says what to install."""
    return _lines(require("plotly.offline", "ownerwise[report]", "a report").get_plotlyjs())


def _asset(name: str) -> str:
    return _lines(resources.files("ownerwise.report").joinpath("assets", name).read_text("utf-8"))


def _lines(text: str) -> str:
    """Return text with the line endings that a browser uses, so that the hashes match."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
