"""Who owns which record, and the privacy budget each owner sets."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.errors import BudgetError, PrivacyWarning, name_some
from ownerwise.owners.budget_tables import (
    GIVE_RECORDS,
    OWN_DELTA,
    BudgetColumn,
    read_budgets,
    read_levels,
)
from ownerwise.owners.frozen import frozen
from ownerwise.owners.tables import as_array, as_ids, report_lookalikes

UNIT = "ONE RECORD, not one owner"
"""The unit of privacy, as stated in every table."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Owners:
    """Owners, their budgets (epsilon, delta), and the number of records that each declares.

    Guarantee: privacy covers the CONTENTS of records, one record at a time. Adding or removing one
    record of owner o changes the distribution of what is released by at most (epsilon_o, delta_o).
    The budgets and the declared numbers of records are assumed to be public, because every noise
    scale depends on them. `repr`, errors and warnings nevertheless show counts and ranges rather
    than the full list.

    Each per-owner argument may be one number for all owners, a mapping `{id: value}`, a pandas
    Series indexed by id, or an array in the order of `ids` (sorted). An array with one value per
    record is accepted if every record has a different owner, and the order of the records and the
    order of `ids` give the same budgets.

    Args:
        record_owner: one owner id (int or str) per record. If it is None and `epsilon` is an array,
            every record is its own owner, numbered from 0. If it is None and `epsilon` is a mapping
            or a table, attach the records later with `with_records`.
        epsilon: as above, or a DataFrame or the path to a CSV or Parquet file with the columns
            `owner, epsilon[, delta][, records]`. Values may be keys of `levels`.
        delta: as above, for owners without a delta in the table (no such column, or a blank cell);
            by default 1e-5. A delta in the table takes precedence.
        records: declared number of records, as above; by default the table's column, else the
            counts in `record_owner`, else one per owner. Declared counts are used unchanged, even
            if the actual counts differ.
        levels: the epsilon of each named level, e.g. `{"high": 0.5, "medium": 2, "low": 5}`.

    Attributes:
        ids: owner ids, sorted, int64 or str; every per-owner array follows this order.
        epsilon, delta: budget per owner, float64.
        records: declared number of records per owner, int64.
        records_basis: how `records` was obtained: "declared", "counted" or "assumed one each".
        record_owner_index: position of each record's owner in `ids`, int64, or None.

    Raises:
        BudgetError: if any argument is invalid; the error lists all problems.

    Example:
        >>> Owners(["ann", "bob", "bob"], {"ann": 0.5, "bob": 2.0})
        Owners(2 owners, epsilon 0.5 to 2, delta 1e-05, 3 records counted (assumed public), at most
        2 per owner, records attached)
    """

    ids: np.ndarray
    epsilon: np.ndarray
    delta: np.ndarray
    records: np.ndarray
    records_basis: str
    record_owner_index: np.ndarray | None

    def __init__(
        self,
        record_owner: Iterable[Any] | None,
        epsilon: Any,
        delta: Any = None,
        *,
        records: Any = None,
        levels: Mapping[str, float] | None = None,
    ):
        problems: list[str] = []
        meaning = read_levels(levels, problems)
        columns = read_budgets(epsilon, delta, records, meaning, problems)
        listing = next((columns[what] for what in columns if columns[what].names is not None), None)
        if record_owner is None and listing is None and "epsilon" in columns:
            record_owner = _record_each(columns["epsilon"], problems)
        ids, index, counts = None if listing is None else listing.ids, None, None
        if record_owner is not None:
            ids, index, counts = _match(record_owner, ids, listing is None, problems)
        numbers = {what: columns[what].numbers(ids, meaning, problems) for what in columns}
        if ids is not None:
            for what in columns:
                _report_misfit(columns[what], numbers[what], ids, index, problems)
            if counts is not None and "records" not in columns:
                _report_without_records(ids, counts, problems)
        if problems or ids is None:
            raise BudgetError(problems)

        if OWN_DELTA in numbers:
            own = numbers.pop(OWN_DELTA)
            numbers["delta"] = np.where(np.isnan(own), numbers["delta"], own)
        basis = "declared"
        if "records" not in columns:
            basis = "assumed one each" if counts is None else "counted"
            numbers["records"] = np.ones(()) if counts is None else counts
        per_owner = {what: np.array(np.broadcast_to(numbers[what], len(ids))) for what in numbers}
        per_owner["records"] = per_owner["records"].astype(np.int64)
        self._set(ids=ids, record_owner_index=index, records_basis=basis, **per_owner)
        self._warn_of_large_delta()

    @classmethod
    def from_table(
        cls,
        table: Any,
        delta: Any = None,
        *,
        records: Any = None,
        levels: Mapping[str, float] | None = None,
    ) -> Owners:
        """Return the owners in a budget table (DataFrame, CSV, Parquet, mapping), without records.

        That is enough for planning; `with_records` attaches the owner ids of the data later.
        """
        return cls(None, table, delta, records=records, levels=levels)

    def with_records(self, record_owner: Iterable[Any]) -> Owners:
        """Return these owners with the records' owner ids attached; budgets and counts are kept.

        The records are counted only if `records_basis` is "assumed one each".
        """
        problems: list[str] = []
        _, index, counts = _match(record_owner, self.ids, False, problems)
        other = copy.copy(self)
        other._set(record_owner_index=index)
        if self.records_basis == "assumed one each" and counts is not None:
            _report_without_records(self.ids, counts, problems)
            other._set(records=counts, records_basis="counted")
        if problems:
            raise BudgetError(problems)
        other._warn_of_large_delta()
        return other

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total_records(self) -> int:
        """Total number of records declared by all owners."""
        return int(self.records.sum())

    @property
    def largest_holding(self) -> int:
        """Largest number of records declared by one owner."""
        return int(self.records.max())

    @property
    def fingerprint(self) -> str:
        """Hash of ids and declared counts, which ties a stored plan to its owners."""
        ids = self.ids
        if ids.dtype.kind == "U":  # as wide as the longest id, however wide the array was
            ids = ids.astype(f"U{np.char.str_len(ids).max()}")
        digest = hashlib.sha256(f"{ids.dtype.newbyteorder('<').str} {len(ids)}\n".encode())
        for array in (ids, self.records):
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        records = {
            "declared": f"{self.total_records} records declared",
            "counted": f"{self.total_records} records counted",
            "assumed one each": "one record each",
        }[self.records_basis]
        attached = "no records attached" if self.record_owner_index is None else "records attached"
        return (
            f"Owners({len(self)} owners, epsilon {_range(self.epsilon)}, "
            f"delta {_range(self.delta)}, {records} (assumed public), "
            f"at most {self.largest_holding} per owner, {attached})"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state)  # because unpickled and deep-copied arrays are writeable

    def _set(self, **attributes: Any) -> None:
        """Set attributes of the frozen object, and make its arrays immutable."""
        for name, value in attributes.items():
            vars(self)[name] = frozen(value) if isinstance(value, np.ndarray) else value

    def _warn_of_large_delta(self) -> None:
        large = self.delta > 1.0 / self.total_records
        if large.any():
            warnings.warn(
                f"delta of owner {name_some(self.ids[large])} is up to {self.delta.max():g}, "
                f"above 1/{self.total_records} (one over the number of records). Such a guarantee "
                f"permits publishing a whole record. Use at most {0.1 / self.total_records:.1g}",
                PrivacyWarning,
                stacklevel=3,
            )


def _range(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _kind(ids: np.ndarray) -> str:
    return "str" if ids.dtype.kind == "U" else "int"


def _record_each(epsilon: BudgetColumn, problems: list[str]) -> np.ndarray | None:
    """Return a different owner id for every record, if no ids were given."""
    if epsilon.cells.ndim:
        return np.arange(len(epsilon.cells))
    problems.append(
        "record_owner is None and epsilon is a single number, so the owners are unknown; "
        "expected one owner id per record, one epsilon per record, or a table of budgets"
    )
    return None


def _match(
    record_owner: Any, ids: np.ndarray | None, find_ids: bool, problems: list[str]
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Return the ids, the position of each record's owner in them, and each owner's record count.

    With `find_ids`, the ids are taken from the records. A result is None if problems make it
    impossible to determine.
    """
    given = as_array(record_owner)
    present = as_ids(given, "record_owner", problems)
    if present is None or not len(present):
        return ids, None, None
    seen, inverse, counts = np.unique(present, return_inverse=True, return_counts=True)
    complete = len(present) == len(given)
    if find_ids:
        return (seen, inverse, counts) if complete else (None, None, None)
    if ids is None or _report_other_kind(present, "record_owner", ids, problems):
        return ids, None, None
    position = np.minimum(np.searchsorted(ids, seen), len(ids) - 1)
    stray = ids[position] != seen
    if stray.any():
        problems.append(
            f"no budget for owner {name_some(seen[stray])}; add a budget, or leave out their "
            "records"
        )
        if _kind(ids) == "str":
            report_lookalikes([*ids.tolist(), *seen[stray].tolist()], "record_owner", problems)
    records = np.zeros(len(ids), dtype=np.int64)
    records[position[~stray]] = counts[~stray]
    return ids, position[inverse], records if complete else None


def _report_other_kind(other: np.ndarray, where: str, ids: np.ndarray, problems: list[str]) -> bool:
    if _kind(other) == _kind(ids):
        return False
    problems.append(
        f"owner ids are {_kind(other)} in {where} (such as {other.tolist()[0]!r}) and {_kind(ids)} "
        f"in the budgets (such as {ids.tolist()[0]!r}); expected the same type in both: convert "
        f"those in {where} to {_kind(ids)}"
    )
    return True


def _report_without_records(ids: np.ndarray, counts: np.ndarray, problems: list[str]) -> None:
    if not counts.all():
        problems.append(
            f"owner without records: {name_some(ids[counts == 0])} has a budget but no "
            f"records; remove the owner, or {GIVE_RECORDS}"
        )


def _report_misfit(
    column: BudgetColumn,
    values: np.ndarray,
    ids: np.ndarray,
    index: np.ndarray | None,
    problems: list[str],
) -> None:
    """Report a column that does not have exactly one value per owner."""
    if column.ids is not None and column.ids is not ids:
        _report_other_owners(column.ids, column.where, ids, problems)
    if column.names is not None or not values.ndim:
        return
    mapping = f"a mapping {{id: {column.what}}}"
    if len(values) == len(ids):
        if index is not None and _two_orders(values, index):
            problems.append(
                f"{column.what}: {len(ids)} values for {len(ids)} owners with one record each, but "
                f"the ids of the records ({name_some(ids[index])}) are not in ascending order; "
                "it is unclear whether the values follow the records or the sorted ids: pass "
                f"{mapping}"
            )
    elif index is not None and len(values) == len(index):
        counts = np.bincount(index)
        problems.append(
            f"{column.what}: one value for each record, but owner {ids[counts.argmax()]} has "
            f"several records; expected one value per owner ({mapping}), or a separate owner for "
            "every record"
        )
    else:
        problems.append(
            f"{column.what}: {len(values)} values for {len(ids)} owners; expected one number for "
            f"all owners, {mapping}, or one value per owner in the order of the sorted ids"
        )


def _report_other_owners(
    named: np.ndarray, where: str, ids: np.ndarray, problems: list[str]
) -> None:
    if _report_other_kind(named, where, ids, problems):
        return
    missing, unknown = np.setdiff1d(ids, named), np.setdiff1d(named, ids)
    if len(missing):
        problems.append(
            f"{where} has no value for owner {name_some(missing)}; expected one value per owner: "
            "add it, or pass one number for all owners"
        )
    if len(unknown):
        problems.append(
            f"{where} names owner {name_some(unknown)}, who has no budget; add a budget, or remove "
            f"the owner from {where}"
        )


def _two_orders(values: np.ndarray, index: np.ndarray) -> bool:
    """Return whether reading the values by record and by sorted id gives different budgets."""
    if len(index) != len(values) or np.bincount(index).max() > 1:
        return False
    ascending = np.array_equal(index, np.arange(len(index)))
    return not ascending and not np.array_equal(values, values[index])
