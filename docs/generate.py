"""Parts of pages that are generated from the code when the site is built.

A page requests one with `<!-- generated: NAME -->`. Links to files in examples/ become links to the
page that shows them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ownerwise.cli.main import make_parser
from ownerwise.config.sections import SECTIONS

ROOT = Path(__file__).parents[1]
_SOURCE = ROOT / "src" / "ownerwise"
_EXAMPLES = ROOT / "examples"
_NOTEBOOKS = ROOT / "notebooks"
_WIDTH = 88
_PLACE = re.compile(r"<!-- generated: (\w+) -->")
_EXAMPLE_LINK = re.compile(r"\]\((?:\.\./)+examples/([\w.-]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the generated parts of a page; MkDocs calls this for every page."""
    up = "../" * page.file.src_uri.count("/")
    linked = _EXAMPLE_LINK.sub(rf"]({up}examples.md#\1)", markdown)
    return _PLACE.sub(lambda place: MAKERS[place[1]](), linked)


def commands() -> str:
    """Return the help of every command."""
    overview = make_parser("")  # without other packages' commands, as a user sees it
    helps = _helps(make_parser()) | {overview.prog: _help(overview)}
    return "\n\n".join(f"## {name}\n\n```text\n{text}```" for name, text in helps.items())


def _helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    helps = {parser.prog: _help(parser)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                helps |= _helps(inner)
    return helps


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = functools.partial(argparse.HelpFormatter, width=_WIDTH)
    return parser.format_help()


def modules() -> str:
    """Return every module with the first line of its docstring, package by package."""
    parts = []
    for folder in (_SOURCE, *sorted(path for path in _SOURCE.rglob("*") if path.is_dir())):
        lines = list(_module_lines(folder))
        if lines:
            package = ".".join(folder.relative_to(_SOURCE.parent).parts)
            table = "\n".join(["| module | contents |", "|---|---|", *lines])
            parts.append(f"### {package}\n\n{_first_line(folder / '__init__.py')}\n\n{table}")
    return "\n\n".join(parts)


def _module_lines(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"| `{path.name}` | {_first_line(path).replace('|', '&#124;')} |"


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def examples() -> str:
    """Return the files in examples/ in full, except that tables are shortened."""
    parts = []
    for path in sorted(_EXAMPLES.glob("*.*")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            lines = text.splitlines(keepends=True)
            text = "".join(lines[:6]) + (f"... {len(lines) - 6} more rows\n" if lines[6:] else "")
        kind = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
        parts.append(f"## {path.name} {{ #{path.name} }}\n\n```{kind}\n{text}```")
    return "\n\n".join(parts)


def notebook(number: int) -> str:
    """Return a notebook as Markdown, with the outputs that are stored in it."""
    (path,) = _NOTEBOOKS.glob(f"{number}-*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell))


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        to_docs = source.replace("](../docs/", "](../")
        yield re.sub(r"\]\((\d-[\w-]+)\.ipynb\)", r"](\1.md)", to_docs)
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).strip()
            yield f'<img alt="figure drawn by this code" src="data:image/png;base64,{picture}">'
        else:
            text = "".join(output.get("text", data.get("text/plain", "")))
            yield f"```text\n{text.rstrip()}\n```"


def keys(section: str) -> str:
    """Return the table of a configuration section's keys."""
    rows = (
        f"| `{key}` | {rule.expected} | {rule.meaning} |" for key, rule in SECTIONS[section].items()
    )
    return "\n".join(["| key | value | meaning |", "|---|---|---|", *rows])


MAKERS = {
    "commands": commands,
    "modules": modules,
    "examples": examples,
    **{f"notebook_{number}": functools.partial(notebook, number) for number in range(1, 5)},
    **{f"keys_{section}": functools.partial(keys, section) for section in SECTIONS},
}
