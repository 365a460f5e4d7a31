"""Which rows of each owner to keep, so that no owner has more than a given number.

Whether a row is kept depends on its owner's rows alone: on the owner's id, and on the row's
position among the owner's rows. Adding or removing the rows of another owner changes nothing.

With several owners per row, this cannot be said of the rows of one owner: if the rows of ann are
removed, bob's rows fall below the limit, and others of his rows would come back. So each set of
owners has a public number of rows to keep (`shared.bounded_shared`), and a row's place among the
rows of its own set decides. Removing an owner removes their sets and changes no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ownerwise.errors import known_names

SELECTIONS = ("random", "first")
"""Ways to select an owner's rows."""


def bound_problems(max_records: Any, select: Any, key: Any) -> list[str]:
    """Return all problems with the arguments of `Owners.bound`."""
    problems = []
    whole = isinstance(max_records, int | np.integer) and not isinstance(max_records, bool)
    if not whole or max_records < 1:
        problems.append(f"max_records {max_records!r}: expected a whole number of at least 1")
    if select not in SELECTIONS:
        problems.append(f"select is {select!r}; {known_names(select, SELECTIONS)}")
    if isinstance(key, bool) or not isinstance(key, int | str | bytes):
        problems.append(f"key {key!r}: expected a public number or text")
    return problems


def kept_rows(
    index: np.ndarray,
    ids: Sequence[Any] | np.ndarray,
    limits: np.ndarray,
    select: str,
    key: int | str | bytes,
) -> np.ndarray:
    """Return the positions of the rows to keep, ascending.

    Args:
        index: position of each row's owner in `ids`.
        ids: owner ids, and tuples of ids for sets of owners who share rows.
        limits: the most rows to keep, per entry of `ids`.
        select: "first" keeps an owner's first rows; "random" keeps those with the smallest keyed
            hashes of (owner id, position among the owner's rows).
        key: the public key of the hashes.
    """
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=len(ids))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rank = np.arange(len(index)) - np.repeat(starts, counts)  # among the owner's rows
    if select == "random":
        for owner in np.flatnonzero(counts > limits):
            hashes = _hashes(ids[int(owner)], int(counts[owner]), key)
            rank[starts[owner] : starts[owner] + counts[owner]] = np.argsort(np.argsort(hashes))
    return np.sort(order[rank < np.repeat(limits, counts)])


def _hashes(owner: Any, count: int, key: int | str | bytes) -> np.ndarray:
    """Return a 128-bit hash for each position among the owner's rows."""
    public = hashlib.sha256(repr(key).encode()).digest()
    kind = "int" if isinstance(owner, int | np.integer) else "str"
    name = f"{kind} {owner}"
    if isinstance(owner, tuple):  # repr keeps ("a", "b") apart from ("a', 'b",)
        name = f"set {list(owner)!r}"
    base = hashlib.blake2b(f"{name}\n".encode(), key=public, digest_size=16)
    found = []
    for position in range(count):
        one = base.copy()
        one.update(str(position).encode())
        found.append(one.digest())
    return np.frombuffer(b"".join(found), dtype=[("high", ">u8"), ("low", ">u8")])
