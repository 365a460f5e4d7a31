"""The section about column statistics: what was released before training, and how precisely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ownerwise.report.blocks import Block, Notes, Section, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.runs import Run

INTRODUCTION = (
    "Before training, the number of known values, the sum and the sum of squares of every column "
    "of numbers were released with noise, once. The inputs are standardised by the resulting means "
    "and standard deviations, and a missing value becomes the mean. Every owner's budget covers "
    "this release. A column that its noise would hide keeps its declared range."
)


def released(run: Run) -> dict[str, Any] | None:
    """Return the statistics that a run released, or None."""
    return run.history[0].get("statistics") if run.history else None


def _notes(run: Run) -> Notes | None:
    if run.plan.opening_std is None:
        return None
    found = released(run)
    words = "planned; the record of the release is missing"
    if found is not None:
        kept = sum(map(_keeps_range, found["mean"], found["deviation"]))
        words = f"{len(found['mean'])} columns, noise std {found['std']:.4g} on their sums"
        words += f"; {kept} too noisy, with their declared range instead" if kept else ""
    return Notes(card={"Column statistics": words})


def _keeps_range(mean: float, deviation: float) -> bool:
    return mean == 0.0 and deviation == 1.0


def _build(comparison: Comparison) -> Sequence[Block] | None:
    rows = [row for method in comparison.methods for row in _rows(method.label, method.runs)]
    if not rows:
        return None
    caption = (
        "Released with noise, for the first run of each method. Means and standard deviations are "
        "in percent of the declared range: 0% is its lowest value, 100% its highest"
    )
    headings = ["Method", "Column", "Known values", "Mean, %", "Standard deviation, %"]
    return [Text(INTRODUCTION, "lead"), Table(caption, headings, rows, words=2)]


def _rows(label: str, runs: Sequence[Run]) -> list[list[str]]:
    run = next((run for run in runs if released(run) is not None), None)
    found = None if run is None else released(run)
    if run is None or found is None:
        return []
    names = run.config.get("prediction", {}).get("columns", [])
    rows = []
    for at, (known, mean, deviation) in enumerate(
        zip(found["known"], found["mean"], found["deviation"], strict=True)
    ):
        name = names[at] if at < len(names) else f"column {at}"
        if _keeps_range(mean, deviation):
            rows.append([label, name, _count(known), "declared range", "declared range"])
        else:
            rows.append(
                [label, name, _count(known), f"{50 * (mean + 1):.1f}", f"{50 * deviation:.1f}"]
            )
    return rows


def _count(known: float) -> str:
    return f"{max(0, math.floor(known + 0.5))}"


SECTION = Section(
    "statistics", "Column statistics", "Column statistics released before training", _build,
    notes=_notes,
)  # fmt: skip
