"""Who owns which record, and the privacy budget each owner sets."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ownerwise.budget_tables import BudgetTable, read_table
from ownerwise.errors import BudgetError, PrivacyWarning

UNIT = "one record (add or remove one record; an owner with k records has the guarantee k times)"
"""The unit of privacy, in the words that every table and card repeats."""


class Owners:
    """Owners, their budgets (epsilon, delta), and how many records each declares.

    The guarantee covers the CONTENTS of records, one record at a time: adding or removing one
    record of owner o changes what is released by at most (epsilon_o, delta_o). The table of
    budgets and the declared numbers of records are public constants: every noise scale depends on
    them. `repr`, logs and errors still show counts and ranges rather than the list.

    Args:
        record_owner: one owner id (int or str) per record; None: every record is its own owner,
            numbered 0, 1, ..., or, with a table, the records are attached later (`with_records`).
        epsilon: `{id: epsilon}`; one number for all; an array in the order of `ids` (sorted); a
            DataFrame, or the path of a CSV or Parquet file, with columns
            `owner, epsilon[, delta][, records]`. Values may be names of `levels`.
        delta: one number, `{id: delta}`, or an array in the order of `ids`.
        records: declared number of records per owner, as mapping or array; by default the table's
            column, else the counts of `record_owner`. Data with other counts is accepted and
            changes nothing of a plan.
        levels: what categorical budgets mean, e.g. `{"high": 0.5, "medium": 2, "low": 5}`.

    Attributes:
        ids: owner ids, sorted; every per-owner array follows this order.
        epsilon, delta: budget per owner.
        records: declared number of records per owner.
        record_owner_index: per record the position of its owner in `ids`, or None.
    """

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
        table = read_table(epsilon)
        if table is not None:
            epsilon = table.as_mapping("epsilon")
            problems += table.problems
            delta = delta if delta is not None else table.as_mapping("delta")
            records = records if records is not None else table.as_mapping("records")
        if delta is None:
            delta = 1e-5
        present = _record_ids(record_owner, epsilon, table, problems)
        if problems:
            raise BudgetError(problems)

        mapped = isinstance(epsilon, Mapping)
        listed = _as_ids(list(epsilon), "the budget table") if mapped else None
        if present is not None:
            seen, index, counts = np.unique(present, return_inverse=True, return_counts=True)
        elif listed is not None:
            seen, index, counts = np.sort(listed), None, np.ones(len(listed), dtype=np.int64)
        else:
            raise BudgetError(
                "record_owner=None and a single epsilon: expected one owner id per record, one "
                "epsilon per record, or a table of budgets"
            )
        self.ids = seen
        if listed is not None and present is not None:
            self.ids, index, counts = _match(seen, index, counts, listed, records, problems)
        self.epsilon = _levels_to_numbers(
            _per_owner(
                "epsilon", epsilon, self.ids, None if index is None else len(index), problems
            ),
            self.ids,
            levels,
            problems,
        )
        self.delta = _numbers(
            "delta", _per_owner("delta", delta, self.ids, None, problems), problems
        )
        declared = counts if records is None else records
        self.records = _numbers(
            "records", _per_owner("records", declared, self.ids, None, problems), problems
        )
        self.record_owner_index: np.ndarray | None = index
        self._check(problems, declared=records is not None)
        if problems:
            raise BudgetError(problems)
        self.records = self.records.astype(np.int64)
        for array in (self.ids, self.epsilon, self.delta, self.records):
            array.flags.writeable = False
        if (self.delta > 1.0 / self.total_records).any():
            worst = float(self.delta.max())
            warnings.warn(
                f"delta {worst:g} is above 1/{self.total_records}, one over the number of "
                f"records: it would permit publishing some record in full. Use at most "
                f"{0.1 / self.total_records:.1g}",
                PrivacyWarning,
                stacklevel=2,
            )

    @classmethod
    def from_table(cls, table: Any, **options: Any) -> Owners:
        """Return the owners of a budget table (DataFrame, CSV or Parquet), without records.

        Enough for planning; `with_records` attaches the data's owner ids later.
        """
        return cls(None, table, **options)

    def with_records(self, record_owner: Iterable[Any]) -> Owners:
        """Return these owners with the records' owner ids attached; budgets and counts stay."""
        as_map = {
            name: dict(zip(self.ids.tolist(), getattr(self, name).tolist(), strict=True))
            for name in ("epsilon", "delta", "records")
        }
        return Owners(record_owner, as_map["epsilon"], as_map["delta"], records=as_map["records"])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total_records(self) -> int:
        """Declared number of records of all owners."""
        return int(self.records.sum())

    @property
    def largest_holding(self) -> int:
        """Largest declared number of records of one owner."""
        return int(self.records.max())

    @property
    def fingerprint(self) -> str:
        """Hash of ids and declared counts: ties a stored plan to its owners."""
        digest = hashlib.sha256()
        kind = "int" if self.ids.dtype.kind in "iu" else "str"
        digest.update(kind.encode())
        if kind == "int":
            digest.update(self.ids.astype("<i8").tobytes())
        else:
            for name in self.ids.tolist():
                digest.update(len(name.encode()).to_bytes(4, "little") + name.encode())
        digest.update(self.records.astype("<i8").tobytes())
        return digest.hexdigest()

    def index_of(self, owner: Any) -> int:
        """Return the position of an owner in `ids`."""
        at = int(np.searchsorted(self.ids, owner))
        if at >= len(self.ids) or self.ids[at] != owner:
            raise KeyError(f"no owner {owner!r} among {len(self)} owners")
        return at

    def __repr__(self) -> str:
        data = "no records attached" if self.record_owner_index is None else "records attached"
        return (
            f"Owners({len(self)} owners, {self.total_records} records declared, {data}, "
            f"epsilon {_range(self.epsilon)}, delta {_range(self.delta)}, "
            f"at most {self.largest_holding} records per owner)"
        )

    def _check(self, problems: list[str], declared: bool) -> None:
        bad = ~(np.isfinite(self.epsilon) & (self.epsilon > 0))
        _report(
            problems,
            bad,
            self.ids,
            self.epsilon,
            "epsilon",
            "expected a positive finite number (common: 0.1 to 10)",
        )
        bad = ~((self.delta > 0) & (self.delta < 1))
        _report(
            problems,
            bad,
            self.ids,
            self.delta,
            "delta",
            "expected a number between 0 and 1, well below 1/records (common: 1e-5)",
        )
        bad = ~((self.records >= 1) & (self.records == np.floor(self.records)))
        advice = "expected a whole number of at least 1"
        if not declared:
            advice = "the owner is in the budget table but owns no record: remove it, or declare records="
        _report(problems, bad, self.ids, self.records, "records", advice)


def _range(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _report(
    problems: list[str],
    bad: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    what: str,
    advice: str,
) -> None:
    """Add one problem that names the first owners concerned and counts the rest."""
    at = np.flatnonzero(bad)
    if not len(at):
        return
    named = ", ".join(f"{ids[i]!s} ({what} {values[i]:g})" for i in at[:3])
    more = f" and {len(at) - 3} more" if len(at) > 3 else ""
    problems.append(f"{what} of owner {named}{more}: {advice}")


def _as_ids(values: Sequence[Any] | np.ndarray, where: str) -> np.ndarray:
    """Return ids as an int64 or str array; anything else is refused."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise BudgetError(f"owner ids in {where} have shape {array.shape}; expected one dimension")
    if array.size == 0:
        raise BudgetError(f"{where} is empty; expected at least one owner")
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind in "UT":
        return array.astype(str)
    if array.dtype.kind == "O":
        kinds = {type(value) for value in array.tolist()}
        if kinds <= {int, np.int64, np.int32}:
            return array.astype(np.int64)
        if kinds <= {str, np.str_}:
            return array.astype(str)
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise BudgetError(
            f"owner ids in {where} are of type {found}; expected all int or all str, none missing"
        )
    raise BudgetError(f"owner ids in {where} are of type {array.dtype}; expected int or str")


def _record_ids(
    record_owner: Any, epsilon: Any, table: BudgetTable | None, problems: list[str]
) -> np.ndarray | None:
    """Return one owner id per record, or None where only a table is known."""
    if record_owner is None:
        if isinstance(epsilon, Mapping) or np.ndim(epsilon) == 0:
            return None
        return np.arange(len(epsilon))
    if hasattr(record_owner, "detach"):  # a torch tensor
        record_owner = record_owner.detach().cpu().numpy()
    if not isinstance(record_owner, np.ndarray):
        record_owner = np.asarray(list(record_owner))
    if table is not None and isinstance(epsilon, Mapping) and not epsilon:
        problems.append("the budget table is empty; expected at least one owner")
    return _as_ids(record_owner, "record_owner")


def _match(
    seen: np.ndarray,
    index: np.ndarray,
    counts: np.ndarray,
    listed: np.ndarray,
    records: Any,
    problems: list[str],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids of the table, the records' positions in it, and the real counts."""
    if listed.dtype.kind != seen.dtype.kind:
        problems.append(
            f"owner ids are {_kind(listed)} in the budget table and {_kind(seen)} in "
            "record_owner; expected the same type in both"
        )
        raise BudgetError(problems)
    ids = np.sort(listed)
    position = np.minimum(np.searchsorted(ids, seen), len(ids) - 1)
    missing = ids[position] != seen
    if missing.any():
        named = ", ".join(str(name) for name in seen[missing][:3])
        more = f" and {missing.sum() - 3} more" if missing.sum() > 3 else ""
        problems.append(
            f"record without budget: owner {named}{more} owns {counts[missing].sum()} records but "
            "is not in the budget table; add a row, or leave the records out"
        )
        raise BudgetError(problems)
    real = np.zeros(len(ids), dtype=np.int64)
    real[position] = counts
    return ids, position[index], real


def _kind(ids: np.ndarray) -> str:
    return "int" if ids.dtype.kind in "iu" else "str"


def _per_owner(
    what: str, given: Any, ids: np.ndarray, n_records: int | None, problems: list[str]
) -> np.ndarray:
    """Return `given` (number, mapping or array) as one entry per owner."""
    if isinstance(given, Mapping):
        missing = [name for name in ids.tolist() if name not in given]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            named = ", ".join(map(str, missing[:3]))
            problems.append(f"{what} is missing for owner {named}{more}; expected one per owner")
            raise BudgetError(problems)
        return np.array([given[name] for name in ids.tolist()])
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    array = np.asarray(given)
    if array.ndim == 0:
        return np.full(len(ids), array[()])
    if array.shape == (len(ids),):
        if n_records == len(ids) and not _is_sorted_by_record(ids):
            problems.append(
                f"{what}: one value per record, and every record has an own owner, but the ids are "
                "not 0, 1, 2, ...: it is unclear whether the values follow the records or the "
                "sorted ids; give a mapping {id: value}"
            )
        return array
    if n_records is not None and array.shape == (n_records,):
        problems.append(
            f"{what}: {n_records} values for {n_records} records of {len(ids)} owners; a budget "
            "belongs to an owner, so expected one per owner (a mapping {id: value}), or record "
            "ids that make every record its own owner"
        )
        raise BudgetError(problems)
    problems.append(
        f"{what} has shape {array.shape}; expected one number, a mapping, or {len(ids)} values "
        "(one per owner, in the order of the sorted ids)"
    )
    raise BudgetError(problems)


def _is_sorted_by_record(ids: np.ndarray) -> bool:
    return ids.dtype.kind in "iu" and bool((ids == np.arange(len(ids))).all())


def _levels_to_numbers(
    values: np.ndarray, ids: np.ndarray, levels: Mapping[str, float] | None, problems: list[str]
) -> np.ndarray:
    """Return epsilon as numbers; names of levels are looked up, numerals are read."""
    if values.dtype.kind in "iuf":
        return values.astype(np.float64)
    result = np.empty(len(values))
    unknown: dict[str, list[str]] = {}
    for at, value in enumerate(values.tolist()):
        if levels is not None and value in levels:
            result[at] = float(levels[value])
            continue
        try:
            result[at] = float(value)
        except (TypeError, ValueError):
            result[at] = 1.0  # reported below
            unknown.setdefault(str(value), []).append(str(ids[at]))
    for level, who in unknown.items():
        known = ", ".join(levels) if levels else "none given: pass levels={'high': 0.5, ...}"
        more = f" and {len(who) - 3} more" if len(who) > 3 else ""
        problems.append(
            f"unknown level {level!r} of owner {', '.join(who[:3])}{more}; known levels: {known}"
        )
    return result


def _numbers(what: str, values: np.ndarray, problems: list[str]) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        problems.append(f"{what} holds something that is not a number; expected numbers")
        return np.ones(len(values))
