"""What is drawn at each step, and what a budget protects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ownerwise.accounting import record_levels
from ownerwise.owners import Owners, Shared, records_of_holders, together


@dataclass(frozen=True, eq=False)
class Holders:
    """A plan's values for each holder: every owner, then every set of owners who share records.

    A record with several owners gets the smallest value of each kind among them.

    Attributes:
        elements: how many things of the holder may be drawn: records, or 1 for the owner.
        sampling_rates, clip_norms: one value per holder.
        release_shares: the most that a record contributes to a release; None if every record may
            contribute in full.
        filter_limits: the limit of individual accounting on a record; None without it.
    """

    elements: np.ndarray
    sampling_rates: np.ndarray
    clip_norms: np.ndarray
    release_shares: np.ndarray | None
    filter_limits: np.ndarray | None = None


def elements(sampling: str, records: np.ndarray) -> np.ndarray:
    """Return how many things may be drawn of each owner: the declared records, or 1 for the owner.

    Args:
        sampling: "record" or "owner".
        records: declared number of records of each owner.
    """
    return np.ones_like(records) if sampling == "owner" else records


def elements_of_holders(sampling: str, records: np.ndarray, shared: Shared | None) -> np.ndarray:
    """Return how many things may be drawn of each holder; a record with several owners counts once.

    Args:
        sampling, records: as for `elements`.
        shared: the sets of owners who share records, if any; only if records are sampled.
    """
    return records_of_holders(elements(sampling, records), shared)


def counted_together(unit: str, sampling: str, records: np.ndarray) -> np.ndarray | None:
    """Return how many records of each owner share the owner's budget; None if it is one element.

    If there are many distinct numbers, they are rounded up to a few.
    """
    return record_levels(records) if (unit, sampling) == ("owner", "record") else None


def hardened_or(unit: str, instead: str) -> str:
    """Return advice against rounding: a hardened plan, if this unit may have one, or `instead`."""
    return instead if unit == "owner" else f"plan with hardened=True, or {instead}"


def shared_problems(owners: Owners) -> list[str]:
    """Return the reason why owner sampling is not possible, if records have several owners."""
    if owners.shared is None:
        return []
    members = owners.ids[list(owners.shared.sets()[0])]
    return [
        f"sampling 'owner' with records of several owners (such as {together(members)}): removing "
        "one of them would also change the clipped vectors of the others, each by up to twice its "
        "clip norm; use sampling='record', or give every record one owner"
    ]
