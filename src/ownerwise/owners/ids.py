"""Owner ids: ints or text, exactly as written. The id "007" remains text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ownerwise.errors import Problems, name_some
from ownerwise.owners.tables import as_array, is_missing


def text_ids(cells: Sequence[str]) -> np.ndarray:
    """Return ids read from text, as ints if every cell is a canonical int (not "007")."""
    try:
        ids = np.array(list(map(int, cells)), dtype=np.int64)
    except (ValueError, OverflowError):
        return as_array(cells)
    return ids if list(map(str, ids.tolist())) == list(cells) else as_array(cells)


def as_ids(
    given: np.ndarray,
    where: str,
    problems: Problems,
    place: Callable[[int], str] = "record {}".format,
) -> np.ndarray | None:
    """Return owner ids as int64 or str, without the missing ones; None if they cannot be used.

    `place` returns a description of a position, for use in messages.
    """
    if given.ndim != 1:
        problems.add(f"{where} has shape {given.shape}; expected a list of owner ids")
        return None
    if not len(given):
        problems.add(f"{where} is empty; expected at least one owner")
        return None
    cells = [] if given.dtype.kind in "iu" else given.tolist()
    missing = [at for at, cell in enumerate(cells) if is_missing(cell)]
    if missing:
        problems.add(
            f"{where}: no owner id in {name_some(missing, place)}; expected an int or a str in "
            "each: add the id, or leave out the entry"
        )
        given = np.delete(given, missing)
    types = set(map(type, given.tolist())) if given.dtype.kind == "O" else {given.dtype.type}
    kinds = sorted(set(map(kind_name, types))) if len(given) else []
    if kinds == ["str"]:
        names = given.tolist()
        if wrong := [at for at, name in enumerate(names) if "\0" in name]:
            problems.add(
                f"{where}: the owner id in {name_some(wrong, place)} contains a NUL character, "
                "which numpy may drop; remove the character"
            )
            return None
        ids = given.astype(str)
        report_lookalikes(names, where, problems)
        return ids
    if kinds == ["int"] and max(int(given.max()), -1 - int(given.min())) < 2**63:
        return given.astype(np.int64)
    if kinds == ["int"]:
        problems.add(f"{where}: an owner id does not fit in 64 bits; use str ids instead")
    elif kinds:
        problems.add(
            f"{where}: owner ids are of type {' and '.join(kinds)}, such as "
            f"{given[:1].tolist()[0]!r}; expected all int or all str: convert them (missing "
            "values may have turned ints into floats)"
        )
    return None


def report_lookalikes(names: Iterable[str], where: str, problems: Problems) -> None:
    """Report ids that differ only in invisible characters or in how letters are composed."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        groups.setdefault(_appearance(name), []).append(name)
    alike = [group for group in groups.values() if len(group) > 1]
    if alike:
        problems.add(
            f"{where}: owner ids {name_some(alike, lambda group: ' and '.join(map(ascii, group)))} "
            "look the same but differ in invisible characters, spaces or Unicode form; "
            "expected one spelling per owner: correct the ids"
        )


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)
"""Invisible characters: Unicode's Default_Ignorable code points and the Braille blank.

The categories Cc and Cf are not listed, because `_appearance` handles them."""


def _appearance(name: str) -> str:
    """Return the text as a reader sees it: NFKC form, no invisible characters, single spaces."""
    if not (name.isascii() and name.isprintable()):
        # removed first, because an invisible character between two letters prevents composition
        name = unicodedata.normalize("NFKC", _UNSEEN.sub("", name))
        hidden = [letter for letter in set(name) if unicodedata.category(letter) in ("Cc", "Cf")]
        name = name.translate({ord(letter): " " if letter.isspace() else "" for letter in hidden})
    return " ".join(name.split())


def kind_name(cell_type: type) -> str:
    """Return the name of an id's type, for messages; numpy's integers are also "int"."""
    if issubclass(cell_type, bool | np.bool_):
        return "bool"
    if issubclass(cell_type, int | np.integer):
        return "int"
    if issubclass(cell_type, float | np.floating):
        return "float"
    return "str" if issubclass(cell_type, str) else cell_type.__name__
