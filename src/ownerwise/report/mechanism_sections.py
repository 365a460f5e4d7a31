"""The sections that mechanisms add to the report, by the mechanism's name.

This is the only file in the report package that names mechanisms. A package with its own mechanism
adds a `Section` (see `blocks`) with an entry point in the group `ownerwise.report_sections`. The
section reads the mechanism's settings from each run's `config`. A mechanism without a section is
reported by its settings alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import WEIGHTS, Weights
from ownerwise.planning import Plan
from ownerwise.registry import Registry
from ownerwise.report import (
    adjustment_section,
    calibration_section,
    constraint_section,
    importance_section,
    statistics_section,
)
from ownerwise.report.blocks import Notes, Section
from ownerwise.runs import Run


def ino(settings: Mapping[str, Any], plan: Plan) -> Weights | None:
    """Return the weights with these settings for a plan; None if their tail is not stored."""
    if settings.get("kind") != "INO":
        return None
    of_tail = ("tail", "tail_length", "alpha", "beta", "shape")
    options = {name: settings[name] for name in of_tail if name in settings}
    try:
        return WEIGHTS.make({"name": "ino", **options}).bind(plan)
    except OwnerwiseError:  # a user-defined tail
        return None


MECHANISM_SECTIONS: Registry[Section] = Registry(
    "ownerwise.report_sections",
    {
        "RateConstraints": constraint_section.SECTION,
        "INO": importance_section.section("INO", ino),
        "Calibration": calibration_section.SECTION,
        "ColumnStatistics": statistics_section.SECTION,
        "PullAdjustment": adjustment_section.SECTION,
    },
)


def notes_of(run: Run) -> list[Notes]:
    """Return the notes of a run's mechanisms."""
    stated = (section.notes(run) for section in MECHANISM_SECTIONS.values())
    return [notes for notes in stated if notes is not None]
