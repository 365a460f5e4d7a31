"""The content of a report as plain data; `templates/blocks.html.jinja` turns it into HTML.

Blocks hold plain text only. The template escapes all of it, so a name cannot become markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ownerwise.report.comparison import Comparison
from ownerwise.report.plots import Figure
from ownerwise.runs import Run


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is "lead", "note" or "" for normal text."""

    words: str
    kind: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    words: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Definitions:
    """Names and their values."""

    values: Mapping[str, str]


class Cell(NamedTuple):
    """A table cell.

    Attributes:
        best: mark the cell with a star.
        whole: keep the text on one line.
        bar: length in percent of a bar that is drawn instead of the text.
    """

    text: str = ""
    best: bool = False
    whole: bool = False
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with its own scroll bar; the first `words` columns are text, the others numbers."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: int = 1


@dataclass(frozen=True)
class Details:
    """Content that is collapsed until the reader opens it."""

    summary: str
    content: Table | Definitions


@dataclass(frozen=True)
class Columns:
    """Lists side by side; each column maps headings to items."""

    columns: Sequence[Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class Banner:
    """A statement about privacy that the reader cannot miss.

    `kind` is "good" (green), "caution" (amber) or "bad" (red).
    """

    title: str
    paragraphs: Sequence[str]
    kind: str


class Tile(NamedTuple):
    """A number with its name and a remark."""

    value: str
    name: str
    note: str


@dataclass(frozen=True)
class Tiles:
    """The most important numbers."""

    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Findings:
    """A list of (subject, statement) pairs."""

    items: Sequence[tuple[str, str]]


Block = (
    Text | Heading | Bullets | Definitions | Table | Details | Columns | Banner | Tiles | Findings
    | Figure
)  # fmt: skip


class Notes(NamedTuple):
    """What a mechanism states about a run that used it, in the report and on the privacy card.

    Attributes:
        assumed_public: what the guarantee assumes to be public, besides the mechanism's settings.
        released: the sum that the mechanism releases at every step.
        card: lines for the card's table about the mechanism.
    """

    assumed_public: Sequence[str] = ()
    released: str = ""
    card: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        id: the section's HTML id.
        link: its name in the navigation bar.
        title: its heading.
        build: returns its content, or None if these runs have none.
        why_missing: returns why there is no content; "" if that is not worth mentioning.
        follows: for a mechanism's section, the id of the section before it.
        notes: for a mechanism's section, returns what it states about a run; None if the run did
            not use the mechanism.
    """

    id: str
    link: str
    title: str
    build: Callable[[Comparison], Sequence[Block] | None]
    why_missing: Callable[[Comparison], str] = lambda comparison: ""
    follows: str = "meaning"
    notes: Callable[[Run], Notes | None] = lambda run: None
