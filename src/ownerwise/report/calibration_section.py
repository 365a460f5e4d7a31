"""The section about calibration: how the release after training changed the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ownerwise.report.blocks import Block, Notes, Section, Table, Text
from ownerwise.report.comparison import Comparison
from ownerwise.runs import Run

INTRODUCTION = (
    "Individual budgets tilt a model towards the owners with larger budgets. After training, "
    "noisy totals of labels and predictions were released, with all records counted equally, and "
    "the class outputs were shifted until the two agreed. Every owner's "
    "budget covers this release."
)
PULL = (
    " Noisy totals of labels weighted by budgets were released as well; they show the direction of "
    "the tilt."
)


def calibrated(run: Run) -> dict[str, Any] | None:
    """Return the results of a run's calibration, or None."""
    return run.history[-1].get("calibration") if run.history else None


def _notes(run: Run) -> Notes | None:
    if run.plan.closing_std is None:
        return None
    found = calibrated(run)
    if found is None:
        words = "planned, but not yet made (counted as spent once all steps are taken)"
    elif found.get("shift") is None:
        words = "made, but its sums were lost: the model was not changed"
    else:
        words = f"{run.plan.closing_count} sums, noise std {found['std']:.4g}"
    return Notes(card={"Calibration": words})


def _build(comparison: Comparison) -> Sequence[Block] | None:
    rows, pulled = [], False
    for method in comparison.methods:
        found = [(run, each) for run in method.runs if (each := calibrated(run)) is not None]
        if not found:
            continue
        metrics = [
            (each["before"], run.history[-1]["validation"])
            for run, each in found
            if each.get("before") and run.history[-1]["validation"]
        ]
        pulled |= any("pull" in each for _, each in found)
        kept = [each["kept"] for _, each in found if "kept" in each]
        rows.append(
            [
                method.label,
                _change([(old["accuracy"], new["accuracy"]) for old, new in metrics]),
                _change([(_worst(old), _worst(new)) for old, new in metrics]),
                f"{100 * np.mean(kept):.0f}%" if kept else "none",
            ]
        )
    if not rows:
        return None
    headings = ["Method", "Accuracy, %", "Worst group's recall, %", "Measured tilt removed"]
    caption = (
        "Before and after calibration, on validation data (not private), averaged over runs. The "
        "last column is below 100% if the measured tilt was close to its noise"
    )
    return [Text(INTRODUCTION + PULL * pulled, "lead"), Table(caption, headings, rows)]


def _worst(metrics: dict[str, Any]) -> float:
    worst = metrics["worst_group"]
    return math.nan if worst is None else worst["recall"]


def _change(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the mean values before and after, in percent: "81.9 → 87.5"."""
    if not pairs:
        return "–"
    before, after = 100 * np.mean(pairs, axis=0)
    if not math.isfinite(before + after):
        return "–"
    return f"{before:.1f} → {after:.1f}"


SECTION = Section("calibration", "Calibration", "Calibration after training", _build, notes=_notes)
