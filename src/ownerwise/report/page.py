"""The page: one self-contained file that makes no network connections."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources

from ownerwise.errors import require
from ownerwise.report.markup import escape
from ownerwise.report.plots import TEMPLATE, Figure


def page(
    title: str, navigation: Sequence[tuple[str, str]], content: str, figures: Sequence[Figure]
) -> str:
    """Return the whole document.

    The content security policy forbids all connections, and all scripts except the two embedded
    here: a user-chosen name could not run as code even if it were not escaped.
    """
    scripts = [plotly_script(), _asset("report.js")]
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src {' '.join(_hash(script) for script in scripts)}; base-uri 'none'; "
        "form-action 'none'"
    )
    links = "".join(f'<a href="#{identity}">{escape(name)}</a>' for identity, name in navigation)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#overview">Skip to the report</a>\n'
        '<header class="bar"><span class="brand">ownerwise</span>'
        f'<nav aria-label="Sections">{links}</nav>'
        '<button type="button" id="theme" aria-pressed="false">Dark</button></header>\n'
        f"<main>\n<h1>{escape(title)}</h1>\n{content}\n</main>\n"
        '<noscript><p class="banner bad">The charts need JavaScript.</p></noscript>\n'
        f'<script type="application/json" id="charts">{_data(figures)}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
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
