"""Write the HTML report: one self-contained file about one or more runs.

The file opens from disk without a network connection and embeds plotly once. The same runs always
produce the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from ownerwise.files import write_text
from ownerwise.report.comparison import Comparison
from ownerwise.report.overview import default_title
from ownerwise.report.page import page
from ownerwise.report.sections import all_sections
from ownerwise.runs import Run


def write_report(runs: Sequence[Run], path: str | PathLike, *, title: str | None = None) -> None:
    """Write one self-contained HTML file about `runs`.

    Runs with the same label count as seeds of one method; the report shows their mean and standard
    deviation. Methods are compared with a baseline, the plain method that the others build on
    (`ownerwise.report.comparison`).

    Args:
        runs: from `Trainer.fit` or `Run.load`.
        path: the file to write; it is written atomically.
        title: heading of the page; by default it names the methods.
    """
    comparison = Comparison.of(runs)
    shown, omitted = [], []
    for section in all_sections():
        blocks = section.build(comparison)
        if blocks is not None:
            shown.append((section, blocks))
        elif reason := section.why_missing(comparison):
            omitted.append(f"{section.title}: {reason}")
    heading = default_title(comparison) if title is None else title
    write_text(path, page(heading, shown, omitted))
