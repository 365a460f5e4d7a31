"""Who owns which record, and the privacy budget each owner sets."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ownerwise.errors import BudgetError, PrivacyWarning, Problems, known_names, name_some
from ownerwise.owners.bounding import bound_problems, kept_rows
from ownerwise.owners.budget_tables import read_budgets
from ownerwise.owners.frozen import frozen
from ownerwise.owners.hints import API, Hints
from ownerwise.owners.matching import (
    held_out_owners,
    match_records,
    report_misfits,
    report_without_records,
)
from ownerwise.owners.shared import (
    Shared,
    bounded_shared,
    positions_of,
    records_of_holders,
    renumbered,
    split_records,
    together,
)
from ownerwise.owners.values import read_levels, read_numbers

UNITS = {"record": "ONE RECORD, not one owner", "owner": "ONE OWNER, with all of their records"}
"""What a plan may promise its epsilon for."""
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

    A record may have several owners. It is then bound by the strictest of them: the smallest
    sampling rate and the smallest clip norm. It counts as a record of each, and removing an owner
    removes all records that the owner is on. Which owners share how many records is assumed to be
    public as well. Owner sampling refuses such records.

    Args:
        record_owner: one owner id (int or str) per record, or a tuple, list or set of ids for a
            record with several owners. If it is None and `epsilon` is an array, every record is its
            own owner, numbered from 0. If it is None and `epsilon` is a mapping or a table, attach
            the records later with `with_records`.
        epsilon: as above, or a DataFrame or the path to a CSV or Parquet file with the columns
            `owner, epsilon[, delta][, records]`. Values may be keys of `levels`.
        delta: as above, for owners without a delta in the table (no such column, or a blank cell);
            by default 1e-5. A delta in the table takes precedence.
        records: declared number of records, as above; by default the table's column, else the
            counts in `record_owner`, else one per owner. Declared counts are used unchanged. An
            owner may have fewer records, but training refuses more unless owners are sampled. A
            plan with unit="owner" also accepts 0. If records have several owners, declare them for
            each set: `{"ann": 2, ("ann", "bob"): 3}`.
        levels: the epsilon of each named level, e.g. `{"high": 0.5, "medium": 2, "low": 5}`.
        held_out: the owners of validation and test records, which no guarantee covers. An owner
            with a budget whose records are all held out is left out: no plan contains them. With
            declared numbers this needs split_by="owner", or a declared number of 0.
        split_by: "owner" if whole owners were held out, chosen by their ids alone; else "record".
            If single records are held out, the records decide who has none left, and a plan with
            declared numbers must not depend on that.
        hints: wording for error messages; set by front ends other than the Python API.

    Attributes:
        ids: owner ids, sorted, int64 or str; every per-owner array follows this order.
        epsilon, delta: budget per owner, float64.
        records: declared number of records that each owner is on, int64.
        records_basis: how `records` was obtained: "declared", "counted" or "assumed one each".
        record_owner_index: position of each record's owner in `ids`, int64, or None. For a record
            with several owners, `len(ids)` plus the number of their set in `shared`.
        shared: the sets of owners who share records, or None if every record has one owner.
        left_out: epsilon of each owner who was left out because all their records are held out.

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
    left_out: Mapping[Any, float]
    shared: Shared | None

    def __init__(
        self,
        record_owner: Iterable[Any] | None,
        epsilon: Any,
        delta: Any = None,
        *,
        records: Any = None,
        levels: Mapping[str, float] | None = None,
        held_out: Iterable[Any] | None = None,
        split_by: str = "record",
        hints: Hints = API,
    ):
        problems = Problems()
        if split_by not in UNITS:
            problems.add(f"split_by is {split_by!r}; {known_names(split_by, UNITS)}")
        meaning = read_levels(levels, problems)
        records, sets = split_records(records, problems)
        tables = read_budgets(epsilon, delta, records, meaning, hints, problems)
        listing = next((table for table in tables if table.names is not None), None)
        ids = None if listing is None else listing.ids
        index = counts = shared = None
        given = tables[0].columns.get("epsilon")
        if record_owner is None and listing is None and given is not None:
            if given.ndim:
                record_owner = np.arange(len(given))
            else:
                problems.add(
                    f"{hints.record_owner} is None and epsilon is a single number, so the owners "
                    "are unknown; expected one owner id per record, one epsilon per record, or a "
                    "table of budgets"
                )
        if record_owner is not None:
            ids, index, counts, shared = match_records(
                record_owner, ids, listing is None, hints.record_owner, problems
            )
        numbers = [read_numbers(table, ids, meaning, hints, problems) for table in tables]
        declared = any("records" in table.columns for table in tables)
        if ids is not None:
            for table, values in zip(tables, numbers, strict=True):
                report_misfits(table, values, ids, None if shared else index, problems)
        absent = np.zeros(0 if ids is None else len(ids), dtype=bool)
        if ids is not None and counts is not None:
            absent = held_out_owners(ids, counts, held_out, problems)
            if not declared:
                report_without_records(ids[~absent], counts[~absent], hints.records, problems)
        problems.raise_(BudgetError)
        assert ids is not None
        if declared:
            found, shared = shared, None if sets is None else positions_of(sets, ids)
            if index is not None:
                index = renumbered(index, found, shared, ids, problems)
            problems.raise_(BudgetError)
            if shared is not None:  # declared sets keep all their owners
                absent[shared.members] = False

        basis = "declared"
        if not declared:
            basis = "assumed one each" if counts is None else "counted"
            numbers.append({"records": np.ones(()) if counts is None else counts})
        per_owner: dict[str, np.ndarray] = {}
        for values in numbers:
            for what, new in values.items():  # a blank delta is NaN; later tables fill it in
                known = per_owner.get(what, np.full(len(ids), np.nan))
                per_owner[what] = np.where(np.isnan(known), new, known)
        per_owner["records"] = per_owner["records"].astype(np.int64)
        if declared and split_by == "record":
            absent &= per_owner["records"] == 0
        left_out = dict(
            zip(ids[absent].tolist(), per_owner["epsilon"][absent].tolist(), strict=True)
        )
        kept = {what: values[~absent] for what, values in per_owner.items()}
        place = np.cumsum(~absent) - 1
        if shared is not None:
            shared = replace(shared, members=place[shared.members])
            place = np.append(place, np.arange(len(shared.sizes)) + np.sum(~absent))
        self._set(
            ids=ids[~absent],
            record_owner_index=None if index is None else place[index],
            records_basis=basis,
            shared=shared,
            left_out=left_out,
            **kept,
        )
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

        That is enough for planning; attach the owner ids of the data later with `with_records`.
        """
        return cls(None, table, delta, records=records, levels=levels)

    def with_records(self, record_owner: Iterable[Any]) -> Owners:
        """Return these owners with the records' owner ids attached; budgets and counts are kept.

        The records are counted only if `records_basis` is "assumed one each".
        """
        problems = Problems()
        _, index, counts, shared = match_records(
            record_owner, self.ids, False, API.record_owner, problems
        )
        other = copy.copy(self)
        if self.records_basis == "assumed one each" and counts is not None:
            report_without_records(self.ids, counts, API.records, problems)
            other._set(records=counts, records_basis="counted", shared=shared)
        elif index is not None:
            index = renumbered(index, shared, self.shared, self.ids, problems)
        other._set(record_owner_index=index)
        problems.raise_(BudgetError)
        other._warn_of_large_delta()
        return other

    def bound(
        self, max_records: int, select: str = "random", key: int | str | bytes = 0
    ) -> tuple[Owners, np.ndarray]:
        """Return owners with at most `max_records` rows each, and the rows to keep.

        A plan with unit="owner" and sampling="record" promises epsilon for an owner with at most as
        many rows as declared. This method enforces that number: train on the rows that are kept,
        and on no others.

            owners, kept = owners.bound(max_records=20)
            inputs, targets = inputs[kept], targets[kept]

        The new owners expect data with exactly these rows, so data with all rows is refused. An
        owner who declares fewer than `max_records` keeps at most the declared number of rows.
        Whether a row is kept depends on its owner's rows alone, so the guarantee still holds for
        the owner's rows before the selection. If rows have several owners, each set of owners keeps
        a number of rows that follows from the declared numbers (which are public), and the set's
        own rows decide which.

        Args:
            max_records: the most rows per owner.
            select: "random" selects by a keyed hash of the owner's id and the row's position among
                the owner's rows; "first" keeps the owner's first rows in the given order.
            key: public key of the hash. It must not depend on the data.

        Returns:
            The owners, and the positions of the rows to keep, ascending.
        """
        problems = Problems()
        problems.add(*bound_problems(max_records, select, key))
        if self.record_owner_index is None:
            problems.add("the owners have no records attached; attach them with with_records first")
        problems.raise_(BudgetError)
        assert self.record_owner_index is not None
        limits = np.minimum(self.records, int(max_records))
        names, shared, records = self.ids, self.shared, limits
        if shared is not None:
            ids = self.ids.tolist()
            names = [*ids, *(tuple(ids[o] for o in members) for members in shared.sets())]
            limits = bounded_shared(limits, self.records, shared)
            shared = shared.with_records(limits[len(ids) :])
            records = limits[: len(ids)] + shared.per_owner(len(ids))
        kept = kept_rows(self.record_owner_index, names, limits, select, key)
        other = copy.copy(self)
        other._set(
            records=records,
            record_owner_index=self.record_owner_index[kept],
            shared=shared,
        )
        return other, kept

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total_records(self) -> int:
        """Total number of records declared by all owners; a record counts once."""
        return int(self.records_of_holders.sum())

    @property
    def records_of_holders(self) -> np.ndarray:
        """Declared number of records of each owner alone, then of each set of owners."""
        return records_of_holders(self.records, self.shared)

    @property
    def largest_holding(self) -> int:
        """Largest number of records declared for any owner."""
        return int(self.records.max())

    def name_of(self, holder: int) -> str:
        """Return the id of an owner, or the ids of a set of owners: "ann + bob"."""
        if holder < len(self):
            return str(self.ids[holder])
        assert self.shared is not None
        return together(self.ids[list(self.shared.sets()[holder - len(self)])])

    @property
    def fingerprint(self) -> str:
        """Hash of ids and declared counts, which ties a stored plan to its owners."""
        return self.fingerprint_of(self.ids, self.records, self.shared)

    @staticmethod
    def fingerprint_of(ids: np.ndarray, records: np.ndarray, shared: Shared | None = None) -> str:
        """Return the hash of sorted ids and declared counts."""
        if ids.dtype.kind == "U":  # as wide as the longest id, however wide the array was
            ids = ids.astype(f"U{np.char.str_len(ids).max()}")
        digest = hashlib.sha256(f"{ids.dtype.newbyteorder('<').str} {len(ids)}\n".encode())
        parts = [] if shared is None else [shared.members, shared.sizes, shared.records]
        for array in (ids, records, *parts):
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        records = {
            "declared": f"{self.total_records} records declared",
            "counted": f"{self.total_records} records counted",
            "assumed one each": "one record each",
        }[self.records_basis]
        if self.shared is not None:
            records += f", {self.shared.records.sum()} of them with several owners"
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
        large = self.delta > 1.0 / max(self.total_records, 1)
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
