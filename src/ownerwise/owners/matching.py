"""Match budgets with records: every record's owner has one budget, and every budget has records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ownerwise.errors import Problems, name_some
from ownerwise.owners.budget_tables import BudgetTable
from ownerwise.owners.ids import as_ids, kind_name, report_lookalikes
from ownerwise.owners.shared import Shared, flat_ids, group_by_holder
from ownerwise.owners.tables import as_array


class Matched(NamedTuple):
    """Who owns the records; a part is None if problems make it impossible to determine.

    Attributes:
        ids: the owners' ids.
        holder: the holder of each record: the position of the owner in `ids`, or `len(ids)` plus
            the number of the set of owners.
        counts: how many records each owner is on.
        shared: the sets of owners who share records, None if there are none.
    """

    ids: np.ndarray | None = None
    holder: np.ndarray | None = None
    counts: np.ndarray | None = None
    shared: Shared | None = None


def match_records(
    record_owner: Any, ids: np.ndarray | None, find_ids: bool, where: str, problems: Problems
) -> Matched:
    """Return who owns the records.

    With `find_ids`, the ids are taken from the records. In messages, the records' ids are called
    `where`.
    """
    given, sizes = flat_ids(as_array(record_owner))
    place = "record {}".format
    if sizes is not None:
        record = np.repeat(np.arange(len(sizes)), sizes)
        place = lambda at: f"record {record[at]}"  # noqa: E731
    present = as_ids(given, where, problems, place)
    if present is None or not len(present):
        return Matched(ids)
    seen, inverse, counts = np.unique(present, return_inverse=True, return_counts=True)
    complete = len(present) == len(given)
    if find_ids:
        return _grouped(seen, inverse, counts, sizes) if complete else Matched()
    if ids is None or _report_other_kind(present, where, ids, problems):
        return Matched(ids)
    position = np.minimum(np.searchsorted(ids, seen), len(ids) - 1)
    stray = ids[position] != seen
    if stray.any():
        problems.add(
            f"no budget for owner {name_some(seen[stray])}; add a budget, or leave out their "
            "records"
        )
        if ids.dtype.kind == "U":
            report_lookalikes([*ids.tolist(), *seen[stray].tolist()], where, problems)
    records = np.zeros(len(ids), dtype=np.int64)
    records[position[~stray]] = counts[~stray]
    if stray.any() or not complete:
        index = None if stray.any() or sizes is not None else position[inverse]
        return Matched(ids, index, records if complete else None)
    return _grouped(ids, position[inverse], records, sizes)


def _grouped(
    ids: np.ndarray, index: np.ndarray, counts: np.ndarray, sizes: np.ndarray | None
) -> Matched:
    if sizes is None:
        return Matched(ids, index, counts)
    index, shared = group_by_holder(index, sizes, len(ids))
    own = np.bincount(index, minlength=len(ids))[: len(ids)]
    counts = own if shared is None else own + shared.per_owner(len(ids))
    return Matched(ids, index, counts, shared)


def _report_other_kind(other: np.ndarray, where: str, ids: np.ndarray, problems: Problems) -> bool:
    found, expected = (kind_name(array.dtype.type) for array in (other, ids))
    if found != expected:
        problems.add(
            f"owner ids are {found} in {where} (such as {other.tolist()[0]!r}) and {expected} in "
            f"the budgets (such as {ids.tolist()[0]!r}); expected the same type in both: convert "
            f"those in {where} to {expected}"
        )
    return found != expected


def held_out_owners(
    ids: np.ndarray, counts: np.ndarray, held_out: Any, problems: Problems
) -> np.ndarray:
    """Return a mask of the owners who have no records but are among the held-out ones."""
    given, _ = flat_ids(as_array([] if held_out is None else held_out))
    held = as_ids(given, "held_out", problems) if len(given) else None
    if held is None or kind_name(held.dtype.type) != kind_name(ids.dtype.type):
        return np.zeros(len(ids), dtype=bool)
    return (counts == 0) & np.isin(ids, held)


def report_without_records(
    ids: np.ndarray, counts: np.ndarray, advice: str, problems: Problems
) -> None:
    """Report owners who have a budget but no records."""
    if not counts.all():
        problems.add(
            f"owner without records: {name_some(ids[counts == 0])} has a budget but no "
            f"records; remove the owner, or {advice}"
        )


def report_misfits(
    table: BudgetTable,
    numbers: Mapping[str, np.ndarray],
    ids: np.ndarray,
    index: np.ndarray | None,
    problems: Problems,
) -> None:
    """Report a problem if a table does not have exactly one value per owner."""
    if table.ids is not None and table.ids is not ids:
        _report_other_owners(table.ids, table.where, ids, problems)
    for what, values in numbers.items():
        if table.names is not None or not values.ndim:
            continue
        mapping = f"a mapping {{id: {what}}}"
        if index is not None and len(values) == len(ids) and _two_orders(values, index):
            problems.add(
                f"{what}: {len(ids)} values for {len(ids)} owners with one record each, but the "
                f"ids of the records ({name_some(ids[index])}) are not in ascending order; it is "
                f"unclear whether the values follow the records or the sorted ids: pass {mapping}"
            )
        elif index is not None and len(values) == len(index) > len(ids):
            several = ids[np.bincount(index).argmax()]
            problems.add(
                f"{what}: one value for each record, but owner {several} has several records; "
                f"expected one value per owner ({mapping}), or a separate owner for every record"
            )
        elif len(values) != len(ids):
            problems.add(
                f"{what}: {len(values)} values for {len(ids)} owners; expected one number for all "
                f"owners, {mapping}, or one value per owner in the order of the sorted ids"
            )


def _report_other_owners(
    named: np.ndarray, where: str, ids: np.ndarray, problems: Problems
) -> None:
    if _report_other_kind(named, where, ids, problems):
        return
    if len(missing := np.setdiff1d(ids, named)):
        problems.add(
            f"{where} has no value for owner {name_some(missing)}; expected one value per owner: "
            "add it, or pass one number for all owners"
        )
    if len(unknown := np.setdiff1d(named, ids)):
        problems.add(
            f"{where} names owner {name_some(unknown)}, who has no budget; add a budget, or remove "
            f"the owner from {where}"
        )


def _two_orders(values: np.ndarray, index: np.ndarray) -> bool:
    """Return whether reading the values by record and by sorted id gives different budgets."""
    if len(index) != len(values) or np.bincount(index).max() > 1:
        return False
    ascending = np.array_equal(index, np.arange(len(index)))
    return not ascending and not np.array_equal(values, values[index])
