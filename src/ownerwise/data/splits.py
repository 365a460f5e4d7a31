"""Choose the records to hold out, one by one or with all records of their owner.

Guarantee: whether a record is held out depends on that record alone (`by="record"`) or on its
owner's id alone (`by="owner"`). Adding or removing a record, or an owner, does not move any other
record between the parts, so the training parts of neighbouring data sets are neighbouring too (or
equal, if what was added is held out). A split by position or by a permutation has no such
guarantee: removing one record moves many others.

Split by owner if owners have several records and the model is meant for new people: no owner is
then on both sides. A plan with unit="owner" needs this, because its promise covers an owner with
ALL of their records, and no guarantee covers held-out ones.

The split is public: anyone may know the seed and `share`, the probability of being held out. Choose
both without looking at the records. No guarantee covers the records that are held out. The number
of held-out records is random (binomial); in each class and for each owner, the fraction held out is
close to `share`, but not exactly equal to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError, known_names
from ownerwise.owners import flat_ids
from ownerwise.wording import name_of

TEST_SHARE = 0.2
"""Default probability that a record in a table becomes a test record."""

SPLITS = ("record", "owner")
"""What a split may keep together: nothing, or all records of an owner."""


def split_by_problems(by: Any, unit: str = "record") -> list[str]:
    """Return the reasons not to split data in this way for a plan with this unit of privacy.

    None is always possible: the split then follows the unit.
    """
    if by is not None and by not in SPLITS:
        return [f"split_by is {by!r}; {known_names(by, SPLITS)}"]
    if (by, unit) == ("record", "owner"):
        return [
            "split_by 'record' with unit 'owner': expected split_by 'owner' (the default), because "
            "each epsilon holds for an owner with ALL of their records, and no guarantee covers "
            "held-out records"
        ]
    return []


def hold_out(
    columns: Sequence[Any],
    owners: np.ndarray | None,
    share: float,
    part: str,
    *,
    by: str = "record",
    seed: int = 0,
) -> np.ndarray:
    """Return a mask of the records to hold out, chosen by record or by owner.

    Args:
        columns: the content of the records, with one entry per record in each column.
        owners: each record's owner; needed to split by owner.
        share: the probability that a record, or an owner, is held out.
        part: "test" or "validation".
        by: one of `SPLITS`.
        seed: a public number, as for `held_out`.
    """
    if by == "record":
        return held_out(content_rows(columns), share, part, seed)
    if owners is None:
        raise OwnerwiseError(
            "split_by 'owner', but the records have no owners: name the column with each record's "
            "owner"
        )
    if flat_ids(owners)[1] is not None:
        raise OwnerwiseError(
            "split_by 'owner', but some records have several owners: a record of a held-out owner "
            "may belong to a training owner too. Choose the parts yourself, so that no owner is in "
            "two of them"
        )
    ids, index = np.unique(owners, return_inverse=True)
    held = held_out(content_rows([ids]), share, part, seed)
    if held.all() or not held.any():
        raise OwnerwiseError(
            f"the {part} share of {share:g} holds out {'all' if held.all() else 'none'} of the "
            f"{len(ids)} owners; expected some, but not all: choose another share"
        )
    return held[index]


def held_out(rows: Iterable[bytes], share: float, part: str, seed: int = 0) -> np.ndarray:
    """Return a mask of the records to hold out, based on a keyed hash of each row.

    Args:
        rows: bytes that identify each record, either its content (see `content_rows`) or its id.
            Equal rows stay together.
        share: the probability of being held out.
        part: "test" or "validation"; the two splits are independent of each other.
        seed: a public number; a different seed gives a different split.
    """
    key = hashlib.sha256(f"ownerwise {part} split, seed {seed}".encode()).digest()
    limit = int(share * 2**64)
    hashes = (hashlib.blake2b(row, digest_size=8, key=key).digest() for row in rows)
    return np.array([int.from_bytes(digest, "big") < limit for digest in hashes], dtype=bool)


def content_rows(columns: Sequence[Any]) -> list[bytes]:
    """Return each record's content as bytes, from columns with one entry per record.

    A cell's bytes depend on its value, not on how an array stores it, because the width of a text
    array and the type of an int array depend on other records.
    """
    return [b"".join(cells) for cells in zip(*map(_cells, columns), strict=True)]


def _cells(column: Any) -> list[bytes]:
    """Return the cells of a column as bytes, each prefixed with its length."""
    if np.ndim(column) > 1:
        rows = list(map(_row, np.ascontiguousarray(column)))
    else:
        listed = column.tolist() if isinstance(column, np.ndarray) else column
        rows = [name_of(cell).encode("utf-8", "surrogatepass") for cell in listed]
    return [len(row).to_bytes(8, "big") + row for row in rows]


def _row(row: np.ndarray) -> bytes:
    """Return a row as bytes, converting numbers to float32 if that is exact, else to float64."""
    if row.dtype.kind not in "fiub":
        return row.tobytes()
    with np.errstate(over="ignore"):
        short = row.astype("<f4")
    exact = np.array_equal(short, row.astype("<f8"), equal_nan=True)
    return (short if exact else row.astype("<f8")).tobytes()


def positional_split(
    targets: np.ndarray, groups: np.ndarray | None = None, every: int = 5
) -> np.ndarray:
    """Return a mask that selects every fifth record of each class, in the order of a public file.

    Use this only for published files that never change, such as those used in papers. The split is
    then part of the data set, as for MNIST, and the records in its training part are the ones to
    protect. For a table that may gain or lose a record, use `held_out`.

    With `groups` (one id per record, such as the subject), every fifth group is selected as a
    whole; a group is assigned the class of its first record.
    """
    if groups is None:
        groups = np.arange(len(targets))
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    group_class = targets[first[by_appearance]]
    chosen = np.zeros(len(first), dtype=bool)
    for label in np.unique(group_class):
        chosen[by_appearance[group_class == label][every - 1 :: every]] = True
    return chosen[member]
