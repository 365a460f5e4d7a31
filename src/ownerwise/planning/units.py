"""What is drawn at each step, and what a budget protects."""

from __future__ import annotations

import numpy as np

from ownerwise.accounting import record_levels


def elements(sampling: str, records: np.ndarray) -> np.ndarray:
    """Return how many things may be drawn of each owner: the declared records, or 1 for the owner.

    Args:
        sampling: "record" or "owner".
        records: declared number of records of each owner.
    """
    return np.ones_like(records) if sampling == "owner" else records


def counted_together(unit: str, sampling: str, records: np.ndarray) -> np.ndarray | None:
    """Return how many records of each owner share the owner's budget; None if it is one element.

    If there are many distinct numbers, they are rounded up to a few.
    """
    return record_levels(records) if (unit, sampling) == ("owner", "record") else None
