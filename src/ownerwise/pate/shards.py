"""Which teachers hold which records: by a keyed hash of each record's own id.

Guarantee: the teachers of a record depend on its id, its budget class and public constants alone.
Adding or removing a record changes the data of its own teachers and of no others. A split by
position or by a permutation has no such guarantee: removing one record moves records between all
teachers. The key is public; the guarantee does not rest on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ownerwise.errors import OwnerwiseError
from ownerwise.owners import Owners
from ownerwise.pate.plans import PatePlan


def content_ids(*arrays: Any) -> list[bytes]:
    """Return an id for each record, derived from its own contents; equal records get equal ids."""
    parts = [np.ascontiguousarray(array) for array in arrays]
    ids = []
    for row in range(len(parts[0])):
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part[row].tobytes())
        ids.append(digest.digest())
    return ids


def teachers_of(
    ids: Sequence[Any], first: np.ndarray, count: np.ndarray, copies: np.ndarray, key: int = 0
) -> list[np.ndarray]:
    """Return the distinct teachers of each record, `copies[i]` of them for record i.

    They are among the teachers `first[i]`, ..., `first[i] + count[i] - 1`.
    """
    if (copies > count).any():
        raise OwnerwiseError("a record cannot be with more teachers than its budget class has")
    return [
        int(start) + _distinct(_name(one), int(among), int(wanted), key)
        for one, start, among, wanted in zip(ids, first, count, copies, strict=True)
    ]


def shards(
    ids: Sequence[Any],
    first: np.ndarray,
    count: np.ndarray,
    copies: np.ndarray,
    teachers: int,
    key: int = 0,
) -> list[np.ndarray]:
    """Return the positions of the records that each teacher holds; see `teachers_of`.

    Records are in the order of a hash of their ids, so the order of one teacher's records does not
    depend on the positions of records elsewhere in the data.
    """
    held: list[list[int]] = [[] for _ in range(teachers)]
    order = sorted(range(len(ids)), key=lambda at: _digest(_name(ids[at]), key))
    of_record = teachers_of(ids, first, count, copies, key)
    for at in order:
        for teacher in of_record[at]:
            held[teacher].append(at)
    return [np.array(each, dtype=np.int64) for each in held]


def _name(one: Any) -> bytes:
    return b"b" + one if isinstance(one, bytes) else b"t" + str(one).encode()


def _digest(name: bytes, key: int) -> bytes:
    return hashlib.blake2b(name, key=b"ownerwise pate %d" % key, digest_size=32).digest()


def _distinct(name: bytes, among: int, wanted: int, key: int) -> np.ndarray:
    """Return `wanted` distinct numbers below `among`, in the order in which the hash gives them."""
    found: dict[int, None] = {}
    block = 0
    while len(found) < wanted:
        words = np.frombuffer(_digest(name + b"#%d" % block, key), dtype="<u8")
        for word in words.tolist():
            if len(found) < wanted:
                found.setdefault(word % among)
        block += 1
    return np.fromiter(found, dtype=np.int64)


def shards_of(plan: PatePlan, owners: Owners, ids: Sequence[Any], key: int = 0) -> list[np.ndarray]:
    """Return the positions of the records that each teacher of a plan holds.

    With unit "owner", the owner's id takes the place of the record's, so all records of an owner
    are with the same teachers.

    Args:
        plan: the plan.
        owners: the plan's owners, with records attached.
        ids: an id for each record that belongs to the record itself, not to its position, such as
            a patient's number, or `content_ids(X, y)`.
        key: public key of the hash.
    """
    index = owners.record_owner_index
    if index is None or len(index) != len(ids):
        raise OwnerwiseError(
            f"{len(ids)} ids for {0 if index is None else len(index)} records: expected one id per "
            "record of the owners"
        )
    same = np.array_equal(owners.epsilon, plan.targets)
    if not (same and np.array_equal(owners.delta, plan.deltas)):
        raise OwnerwiseError("the plan was made for owners with other budgets; make a new plan")
    of_record = plan.classes[index]
    names = list(ids) if plan.unit == "record" else owners.ids[index].tolist()
    return shards(
        names, plan.first[of_record], plan.count[of_record], plan.copies[of_record],
        plan.teachers, key,
    )  # fmt: skip
