"""Owners: who owns which record, and the budget each owner sets.

The first room of the house: it imports `errors` and nothing else of the package.
"""

from ownerwise.owners.budget_tables import (
    OTHER_SEPARATOR,
    as_array,
    as_ids,
    other_separator,
    reworded,
)
from ownerwise.owners.owners import UNIT, Owners

__all__ = [
    "OTHER_SEPARATOR",
    "UNIT",
    "Owners",
    "as_array",
    "as_ids",
    "other_separator",
    "reworded",
]
