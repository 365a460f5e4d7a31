"""Fill the templates. Every value is escaped on output, whether or not a template asks for it."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ownerwise.errors import printable
from ownerwise.report import markdown


def render_html(template: str, **values: Any) -> str:
    """Fill an HTML template; only `Markup` values keep their tags."""
    return _environment(escape_html).get_template(template).render(values)


def render_markdown(template: str, **values: Any) -> str:
    """Fill a Markdown template; values are shown literally, except through `code` and `yaml`."""
    return _environment(markdown.escape).get_template(template).render(values)


def escape_html(value: object) -> str:
    """Return text that is safe inside HTML elements and attributes."""
    lines = str(value).split("\n")
    return html.escape("\n".join(map(printable, lines)), quote=True)


@cache
def _environment(escape: Callable[[object], str]) -> Environment:
    def literal(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))

    environment = Environment(
        loader=PackageLoader("ownerwise.report"),
        autoescape=True,
        finalize=literal,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "code": lambda value: Markup(repr(value)),
        "yaml": _yaml,
    }
    return environment


def _yaml(value: str) -> Markup:
    """Return a one-line YAML string, with spaces in place of characters that YAML forbids."""
    kept = "".join(letter if letter.isprintable() else " " for letter in value)
    return Markup(json.dumps(kept, ensure_ascii=False))  # JSON strings are valid YAML strings
