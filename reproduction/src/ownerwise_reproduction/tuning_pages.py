"""Pages about searches: each method's chosen values and results, and the gain after tuning.

Values are chosen on held-out records; all numbers on a page are measured on test records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_json, write_text
from ownerwise.report.markdown import table
from ownerwise.wording import Amount, duration
from ownerwise_reproduction import provenance, summary, tuning
from ownerwise_reproduction.amounts import percent
from ownerwise_reproduction.drawing import save
from ownerwise_reproduction.methods import KINDS
from ownerwise_reproduction.summary import BASELINE, FEWEST_SEEDS, METRICS
from ownerwise_reproduction.tuning import Point

_FIRST = 0  # the setting with the requested profile and changes


@dataclass(frozen=True)
class Search:
    """A search, as read from its file.

    Attributes:
        name: name of the setting.
        content: content of the file.
        points: one point for each method and draw.
    """

    name: str
    content: Mapping[str, Any]
    points: Sequence[Point]

    @property
    def heading(self) -> str:
        """The setting with its profile and changes."""
        return summary.heading(self.name, *provenance.asked(self.content["command"]))

    @property
    def methods(self) -> list[str]:
        """All methods, with the baseline first."""
        return sorted(self.content["methods"], key=lambda method: method != BASELINE)

    @property
    def criteria(self) -> list[str]:
        """The metrics used to choose values."""
        return list(next(iter(self.content["methods"].values()))["best"])

    def first(self, method: str) -> Point:
        """Return a method's point for the first draw."""
        return self.point(method, _FIRST)

    def chosen(self, method: str, criterion: str) -> Point:
        """Return the point chosen for a method by a criterion on held-out records."""
        return self.point(method, self.content["methods"][method]["best"][criterion])

    def point(self, method: str, number: int) -> Point:
        """Return a method's point for a draw."""
        return next(p for p in self.points if p.method == method and p.number == number)


@dataclass(frozen=True)
class Kept:
    """A method's gain over IDP-SGD on test records, in percentage points.

    Attributes:
        fixed: the gain with the values of the first draw.
        tuned: the gain with the values chosen for each method.
    """

    fixed: float
    tuned: float

    @property
    def share(self) -> float | None:
        """The fraction of the gain that remains; None unless both gains are positive."""
        return self.tuned / self.fixed if min(self.fixed, self.tuned) > 0 else None


def read(folder: str | PathLike, names: Sequence[str] = ()) -> list[Search]:
    """Return the searches in a folder; with `names`, only those for the named settings."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        if names and path.stem not in names:
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            stored = [point for one in content["methods"].values() for point in one["points"]]
            points = list(map(_point, stored))
        except (ValueError, KeyError, TypeError):
            raise OwnerwiseError(
                f"{path} was not written by this version: run its `ownerwise experiments tune` "
                "command again; finished runs are not repeated"
            ) from None
        found.append(Search(path.stem, content, points))
    return found


def _point(stored: Mapping[str, Any]) -> Point:
    amounts = {
        part: {key: Amount(**value) for key, value in stored[part].items()}
        for part in ("validation", "test")
    }
    return Point(**{**stored, **amounts})


def write_pages(
    searches: Sequence[Search], folder: str | PathLike, *, figures: bool = True
) -> dict[str, str]:
    """Write index.md, search.json and frontier.svg into SETTING/tuning; return {title: page}."""
    written = {}
    for search in searches:
        place = Path(folder) / search.name / "tuning"
        picture = None
        if figures:
            picture = place / "frontier.svg"
            save(tuning.frontier_figure(search.points), picture)
        write_json(place / "search.json", search.content)
        write_text(place / "index.md", page(search, picture))
        written[_title(search)] = f"{search.name}/tuning/index.md"
    return written


def page(search: Search, picture: Path | None = None) -> str:
    """Return the Markdown page for a search."""
    content = search.content
    as_it_is = "unchanged" if search.heading == search.name else "as in the heading"
    parts = [
        f"# {_title(search)}",
        f"Every method gets the same {content['trials']} draws of clip norm, learning rate and "
        "steps; INO-SGD's own values are drawn along with them. The first draw is the setting, "
        f"{as_it_is}. Values were chosen on a held-out fraction ({content['validation_share']:g}) "
        "of the training records; the numbers here are measured on test records, "
        f"{_over(content['seeds'])}, in per cent.",
        f"{content['not_private']}. No guarantee covers held-out or test records.",
    ]
    if _compared(search):
        parts += ["## Before and after tuning", *_sentences(search), _kept_table(search)]
    parts += ["## What was chosen", _chosen_table(search)]
    if picture is not None:
        parts += [
            "## Frontiers",
            "Test results of the draws that no other draw of the same method beats on held-out "
            "records; all other draws are shown faintly.",
            f"![{picture.stem}]({picture.name})",
        ]
    wall = duration(sum(point.wall_seconds for point in search.points))
    parts += [
        "## How to reproduce it",
        f"    {content['command']}\n    {provenance.TABLE}",
        f"Total wall time: {wall}. `search.json` next to this page lists every draw with its plan "
        "hashes.",
    ]
    return "\n\n".join(parts) + "\n"


def _title(search: Search) -> str:
    return f"{search.heading}, with all methods tuned"


def _over(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"one seed ({seeds[0]})"
    return f"mean and standard deviation over seeds {', '.join(map(str, seeds))}"


def kept(search: Search, method: str, criterion: str, metric: str) -> Kept:
    """Return a method's gain over IDP-SGD before and after tuning both methods for a criterion."""
    fixed = _gain(search.first(BASELINE), search.first(method), metric)
    tuned = _gain(search.chosen(BASELINE, criterion), search.chosen(method, criterion), metric)
    return Kept(fixed, tuned)


def _gain(before: Point, after: Point, metric: str) -> float:
    return 100 * (after.test[metric].mean - before.test[metric].mean)


def _sentences(search: Search) -> list[str]:
    """Return sentences that describe the gain when accuracy, the usual criterion, decides."""
    metric = "strict" if "strict" in search.criteria else "worst_group"
    enough = len(search.content["seeds"]) >= FEWEST_SEEDS
    values = _values(search.first(BASELINE))
    said = []
    for method in _compared(search):
        found = kept(search, method, "accuracy", metric)
        stays = f": {found.share:.0%} of the gain remains" if enough and found.share else ""
        said.append(
            f"At the first draw ({values}), {_label(method)} differs from IDP-SGD by "
            f"{found.fixed:+.2f} points of recall ({METRICS[metric]}); with both tuned for "
            f"accuracy, by {found.tuned:+.2f} points{stays}."
        )
    return said


def _kept_table(search: Search) -> str:
    metrics = search.criteria
    rows = []
    for method in _compared(search):
        gains = [kept(search, method, "accuracy", metric).fixed for metric in metrics]
        rows.append([_label(method), "the first draw", *(f"{gain:+.2f}" for gain in gains)])
        for criterion in search.criteria:
            gains = [kept(search, method, criterion, metric).tuned for metric in metrics]
            chosen = f"{METRICS[criterion]}, held out"
            rows.append([_label(method), chosen, *(f"{gain:+.2f}" for gain in gains)])
    header = ["points above IDP-SGD", "chosen by", *(METRICS[metric] for metric in metrics)]
    return table(header, rows, texts=2)


def _chosen_table(search: Search) -> str:
    metrics = [metric for metric in METRICS if metric in search.points[0].test]
    rows = []
    for method in search.methods:
        chosen_by = {_FIRST: ["the first draw"]}
        for criterion in search.criteria:
            number = search.chosen(method, criterion).number
            chosen_by.setdefault(number, []).append(METRICS[criterion])
        for number, reasons in chosen_by.items():
            point = search.point(method, number)
            row = [_label(method), ", ".join(reasons), _values(point)]
            rows.append(row + [percent(point.test[metric]) for metric in metrics])
    header = ["method", "chosen by", "values", *(METRICS[metric] for metric in metrics)]
    return table(header, rows, texts=3)


def _values(point: Point) -> str:
    return ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in point.values.items())


def _compared(search: Search) -> list[str]:
    """Return the methods other than IDP-SGD; none if IDP-SGD was not part of the search."""
    return search.methods[1:] if search.methods[0] == BASELINE else []


def _label(method: str) -> str:
    return KINDS[method].label if method in KINDS else method
