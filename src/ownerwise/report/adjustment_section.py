"""The section about the pull adjustment: the shift of each class, from published label counts."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.report.blocks import Block, Notes, Section, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.runs import Run

INTRODUCTION = (
    "Individual budgets tilt a model towards the owners who allow more. In training, the outputs "
    "of the classes were shifted by how hard each class pulls under the plan, so the model learned "
    "without this tilt. The shift follows from the plan and from label counts that were published "
    "before; it cost no privacy. If the counts were taken from the training labels, the accounting "
    "does not cover that."
)
_AIMS = {"natural": "natural class shares", "balanced": "equal class shares"}


def _notes(run: Run) -> Notes | None:
    used = run.config.get("repair")
    if used is None:
        return None
    rows = "each owner" if used["per"] == "owner" else "each budget"
    published = (
        f"label counts published: the number of records of {rows} in each class (at least "
        f"{used['least_records']} records in all), from outside the training labels"
    )
    words = f"tau {used['tau']:g}, {_AIMS[used['aim']]}; label counts published per {used['per']}"
    return Notes([published], card={"Pull adjustment": words})


def _build(comparison: Comparison) -> Sequence[Block] | None:
    rows = []
    for method in comparison.methods:
        used = method.runs[0].config.get("repair")
        if used is not None:
            shift = ", ".join(f"{value:+.3f}" for value in used["shift"])
            rows.append([method.label, f"{used['tau']:g}", _AIMS[used["aim"]], shift])
    if not rows:
        return None
    headings = ["Method", "tau", "Aim", "Shift of each class in the loss"]
    return [Text(INTRODUCTION, "lead"), Table("Pull adjustment", headings, rows, words=4)]


SECTION = Section("adjustment", "Adjustment", "Pull adjustment", _build, notes=_notes)
