"""Records with several owners: which sets of owners share records, and how many.

A *holder* is an owner, or a set of owners who share records. Holders are numbered: first the
owners, in the order of their ids, then the sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.errors import Problems, name_some
from ownerwise.owners.frozen import frozen
from ownerwise.owners.ids import text_ids
from ownerwise.owners.tables import as_array

_SETS = (tuple, list, set, frozenset)


@dataclass(frozen=True, eq=False)
class Shared:
    """The sets of owners who share records, and how many records each set declares.

    All of it is assumed public, like the numbers of records of single owners.

    Attributes:
        members: positions of the owners, set by set, ascending within each, int64.
        sizes: number of owners in each set, at least 2.
        records: declared number of records of each set.
    """

    members: np.ndarray
    sizes: np.ndarray
    records: np.ndarray

    def __post_init__(self):
        for name, array in self.arrays().items():
            object.__setattr__(self, name, frozen(np.asarray(array, dtype=np.int64)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()  # because unpickled and deep-copied arrays are writeable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and all(
            np.array_equal(array, getattr(other, name)) for name, array in self.arrays().items()
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, counts: Mapping[tuple[int, ...], int]) -> Shared | None:
        """Return the sets, given as ascending positions, with their counts; None without sets."""
        if not counts:
            return None
        sets = sorted(counts)
        return cls(
            np.array([owner for members in sets for owner in members]),
            np.array(list(map(len, sets))),
            np.array([counts[members] for members in sets]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the attributes by name."""
        return {"members": self.members, "sizes": self.sizes, "records": self.records}

    def with_records(self, records: np.ndarray) -> Shared:
        """Return the same sets with other numbers of records."""
        return Shared(self.members, self.sizes, records)

    def sets(self) -> list[tuple[int, ...]]:
        """Return the positions of each set's owners."""
        parts = np.split(self.members, np.cumsum(self.sizes)[:-1])
        return [tuple(part.tolist()) for part in parts]

    def per_owner(self, owners: int) -> np.ndarray:
        """Return how many of the shared records each of the owners is on."""
        counts = np.zeros(owners, dtype=np.int64)
        np.add.at(counts, self.members, np.repeat(self.records, self.sizes))
        return counts

    def least(self, values: np.ndarray) -> np.ndarray:
        """Return the smallest of the owners' values for each set."""
        return np.minimum.reduceat(values[self.members], np.cumsum(self.sizes) - self.sizes)


def of_holders(values: np.ndarray, shared: Shared | None) -> np.ndarray:
    """Return a value for each holder: the owners' values, then the smallest of each set."""
    return values if shared is None else np.concatenate([values, shared.least(values)])


def records_of_holders(records: np.ndarray, shared: Shared | None) -> np.ndarray:
    """Return how many records each holder has; the owners' `records` include the shared ones."""
    if shared is None:
        return records
    return np.concatenate([records - shared.per_owner(len(records)), shared.records])


def split_ids(cells: np.ndarray, separator: str) -> np.ndarray:
    """Return a column's cells as tuples of owner ids, if the ids are separated by `separator`."""
    if cells.dtype.kind not in "UO" or not all(isinstance(cell, str) for cell in cells.tolist()):
        return cells
    parts = [[part.strip() for part in cell.split(separator)] for cell in cells.tolist()]
    ids = text_ids([part for cell in parts for part in cell]).tolist()
    ends = np.cumsum(list(map(len, parts))).tolist()
    return as_array(
        [tuple(ids[end - len(cell) : end]) for cell, end in zip(parts, ends, strict=True)]
    )


def flat_ids(given: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return all owner ids of the records in one list, and how many each record has.

    The numbers are None if every record is given as a single id. An empty set becomes a blank id,
    which is then reported.
    """
    cells = given.tolist() if given.dtype.kind == "O" and given.ndim == 1 else []
    if not any(isinstance(cell, _SETS) for cell in cells):
        return given, None
    sets = [list(cell) or [None] if isinstance(cell, _SETS) else [cell] for cell in cells]
    return as_array([owner for ids in sets for owner in ids]), np.array(list(map(len, sets)))


def group_by_holder(
    positions: np.ndarray, sizes: np.ndarray, owners: int
) -> tuple[np.ndarray, Shared | None]:
    """Return the holder of each record, and the sets with their numbers of records.

    Args:
        positions: the owners of the records, record by record.
        sizes: how many of them belong to each record, at least 1; repeated owners count once.
        owners: number of owners.
    """
    record = np.repeat(np.arange(len(sizes)), sizes)
    record, positions = np.divmod(np.unique(record * owners + positions), owners)
    sizes = np.bincount(record)
    starts = np.cumsum(sizes) - sizes
    holder = positions[starts]
    several = np.flatnonzero(sizes > 1)
    parts = zip(starts[several].tolist(), sizes[several].tolist(), strict=True)
    sets = [tuple(positions[start : start + size].tolist()) for start, size in parts]
    counts: dict[tuple[int, ...], int] = {}
    for members in sets:
        counts[members] = counts.get(members, 0) + 1
    number = {members: owners + at for at, members in enumerate(sorted(counts))}
    holder[several] = [number[members] for members in sets]
    return holder, Shared.of(counts)


def renumbered(
    holder: np.ndarray,
    found: Shared | None,
    declared: Shared | None,
    ids: np.ndarray,
    problems: Problems,
) -> np.ndarray:
    """Return the records' holders, numbered as declared; report sets that are not declared."""
    if found is None:
        return holder
    known = {} if declared is None else {s: at for at, s in enumerate(declared.sets())}
    stray = [members for members in found.sets() if members not in known]
    if stray:
        problems.add(
            f"records of {name_some(stray, lambda s: together(ids[list(s)]))} together: their "
            "number is not declared, but the plan needs it. Declare it for each set of owners, "
            "such as records={('ann', 'bob'): 3, 'ann': 2}, or omit records= to count them"
        )
        return holder
    numbers = np.arange(len(ids) + len(found.sizes))
    numbers[len(ids) :] = [len(ids) + known[members] for members in found.sets()]
    return numbers[holder]


def split_records(records: Any, problems: Problems) -> tuple[Any, dict[frozenset[Any], int] | None]:
    """Return the numbers of records per owner, and per set of owners, if `records` has sets.

    `records` may map owners, and sets of owners as tuples, to their own numbers of records. An
    owner's number is then the sum over all sets that the owner is in.
    """
    if not isinstance(records, Mapping) or not any(isinstance(key, _SETS) for key in records):
        return records, None
    per_owner: dict[Any, int] = {}
    sets: dict[frozenset[Any], int] = {}
    wrong = []
    for key, count in records.items():
        members = frozenset(key) if isinstance(key, _SETS) else frozenset([key])
        whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not whole or count < 0 or not members:
            wrong.append(f"{key!r} ({count!r})")
            continue
        for owner in members:
            per_owner[owner] = per_owner.get(owner, 0) + int(count)
        if len(members) > 1:
            sets[members] = sets.get(members, 0) + int(count)
    if wrong:
        problems.add(
            f"records of {name_some(wrong)}: expected a whole number of at least 0 for each owner "
            "and for each set of owners"
        )
        return None, None
    return per_owner, sets


def positions_of(sets: Mapping[frozenset[Any], int], ids: np.ndarray) -> Shared | None:
    """Return the sets, given by ids, that have records."""
    place = {owner: at for at, owner in enumerate(ids.tolist())}
    return Shared.of(
        {tuple(sorted(place[o] for o in members)): n for members, n in sets.items() if n}
    )


def bounded_shared(limits: np.ndarray, records: np.ndarray, shared: Shared) -> np.ndarray:
    """Return numbers of records per holder with which no owner has more than their limit.

    The numbers depend on the declared numbers alone, never on the records. Every
    holder keeps the fraction limit / records of its strictest owner, rounded down. What remains of
    the owners' limits goes to the sets, then to the owners' own records.

    Args:
        limits: the most records of each owner.
        records: declared number of records of each owner, including the shared ones.
        shared: the sets of owners who share records.
    """
    owners = len(records)
    held = records_of_holders(records, shared)
    share = np.minimum(1.0, limits / np.maximum(records, 1))
    kept = np.floor(of_holders(share, shared) * held * (1 - 1e-12)).astype(np.int64)
    whole = of_holders(share, shared) == 1.0
    kept[whole] = held[whole]
    room = limits - kept[:owners] - shared.with_records(kept[owners:]).per_owner(owners)
    for number, members in enumerate(map(list, shared.sets()), start=owners):
        more = min(held[number] - kept[number], room[members].min())
        kept[number] += more
        room[members] -= more
    kept[:owners] += np.minimum(room, held[:owners] - kept[:owners])
    return kept


def together(names: Sequence[Any] | np.ndarray) -> str:
    """Return the name of a set of owners for messages."""
    return " + ".join(map(str, names))
