"""Named releases after training, with options, for configuration files and estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Closing
from ownerwise.registry import Registry
from ownerwise.repair.calibration import Calibration

CALIBRATIONS: Registry[Callable[..., Closing]] = Registry(
    "ownerwise.calibrations", {"classes": Calibration}, kind="calibration"
)
"""Releases from all records after training."""


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
