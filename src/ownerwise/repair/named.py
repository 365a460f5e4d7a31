"""Named releases after training and named repairs, for configuration files and estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Closing
from ownerwise.planning import Plan
from ownerwise.registry import Registry
from ownerwise.repair.calibration import Calibration
from ownerwise.repair.counts import read_counts
from ownerwise.repair.pull import PullAdjustment

CALIBRATIONS: Registry[Callable[..., Closing]] = Registry(
    "ownerwise.calibrations", {"classes": Calibration}, kind="calibration"
)
"""Releases from all records after training."""

REPAIRS: Registry[Callable[..., PullAdjustment]] = Registry(
    "ownerwise.repairs", {"pull": PullAdjustment}, kind="repair"
)
"""Shifts of the class outputs that follow from the plan and from public counts."""


def as_calibration(given: Any) -> Any:
    """Return the release described by true, a name, or a table with options.

    False gives None; any other value is returned unchanged.

    Raises:
        OwnerwiseError: if the name or an option is unknown, or an option has an invalid value.
    """
    if given is True:
        return Calibration()
    if given is False:
        return None
    if not isinstance(given, str | Mapping):
        return given
    described = given if isinstance(given, str) else {"name": "classes", **given}
    if problems := CALIBRATIONS.problems(described, "calibration", "calibration."):
        raise OwnerwiseError(problems)
    return CALIBRATIONS.make(described)


def as_repair(
    given: Any, plan: Plan | None = None, classes: Sequence[str] = (), base: Path | None = None
) -> Any:
    """Return the repair that a table with options describes; else `given`.

    Args:
        given: the table, such as `{"tau": 1.0, "counts": "counts.csv"}`. Counts are a table, or the
            path of a file (see `read_counts`).
        plan, classes: the plan and the names of the classes, for counts in a file.
        base: the folder that the path is relative to.

    Raises:
        OwnerwiseError: if the name or an option is unknown, or an option has a wrong value.
    """
    if not isinstance(given, Mapping):
        return given
    described = {"name": "pull", **given}
    if problems := REPAIRS.problems(described, "repair", "repair."):
        raise OwnerwiseError(problems)
    if isinstance(described.get("counts"), str) and plan is not None:
        path = (base or Path()) / described["counts"]
        described["counts"], described["per"] = read_counts(path, classes, plan)
    return REPAIRS.make(described)
