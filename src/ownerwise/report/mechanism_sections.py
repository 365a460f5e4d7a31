"""The sections that mechanisms add to the report, by the mechanism's name.

A package with its own mechanism adds a `Section` (see `blocks`) with an entry point in the group
`ownerwise.report_sections`. Its `build` finds the mechanism's settings in each run's `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.mechanisms import INO
from ownerwise.planning import Plan
from ownerwise.registry import Registry
from ownerwise.report import constraint_section, importance_section
from ownerwise.report.blocks import Section


def ino(settings: Mapping[str, Any], plan: Plan) -> INO | None:
    """Return the weights with these settings for a plan; None if their tail is not stored."""
    if settings.get("kind") != "INO" or settings.get("shape") is not None:
        return None
    known = ("tail", "tail_length", "alpha", "beta")
    options = {name: settings[name] for name in known if settings.get(name) is not None}
    return INO(**options).bind(plan)


MECHANISM_SECTIONS: Registry[Section] = Registry(
    "ownerwise.report_sections",
    {"RateConstraints": constraint_section.SECTION, "INO": importance_section.section(ino)},
)
