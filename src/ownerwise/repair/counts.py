"""Read published label counts from a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ownerwise.errors import OwnerwiseError, Problems, name_some
from ownerwise.owners import (
    HEADER_ALONE,
    Owners,
    as_array,
    as_ids,
    csv_rows,
    plain_number,
    text_ids,
)
from ownerwise.planning import Plan


def read_counts(path: Path, classes: Sequence[str], plan: Plan) -> tuple[np.ndarray, str]:
    """Return label counts in the order of the plan's owners, and what a row stands for.

    The first column is `owner`, with one row per owner, or `epsilon`, with one row for all owners
    who have that epsilon (see `PullAdjustment.per`). The other columns are the classes. Rows and
    columns may be in any order.
    """
    header, rows = _read(path)
    key, names = header[0], header[1:]
    problems = Problems()
    if key not in ("owner", "epsilon"):
        problems.add(
            f"{path}: the first column is {key!r}; expected owner, or epsilon for counts per budget"
        )
    missing = [name for name in classes if name not in names]
    unknown = [name for name in names if name not in classes]
    for what, wrong in (("no", missing), ("unknown", unknown)):
        if wrong:
            problems.add(
                f"{path}: {what} column {name_some(wrong)}; expected the classes "
                f"{name_some(list(classes), shown=10)}"
            )
    if len(set(names)) < len(names):
        problems.add(f"{path}: a class appears twice in the header; expected each once")
    uneven = [line for line, row in rows if len(row) != len(header)]
    if uneven:
        problems.add(f"{path}, line {name_some(uneven)}: expected {len(header)} cells")
    problems.raise_()
    keys = [row[0] for _, row in rows]
    counts = _numbers(path, [row[1:] for _, row in rows], [line for line, _ in rows])
    order = _by_budget(path, keys, plan) if key == "epsilon" else _by_owner(path, keys, plan)
    columns = [names.index(name) for name in classes]
    return counts[order][:, columns], "budget" if key == "epsilon" else "owner"


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv_rows(file, path, f"{path} is empty; expected a header and rows"))
    except FileNotFoundError:
        raise OwnerwiseError(f"no file {path}; expected a CSV table of label counts") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OwnerwiseError):
            raise
        raise OwnerwiseError(f"{path} cannot be read ({error}); expected CSV (UTF-8)") from None
    (_, header), *rows = lines
    if not rows:
        raise OwnerwiseError(HEADER_ALONE.format(path, "owner, or per epsilon"))
    return header, rows


def _numbers(path: Path, cells: list[list[str]], lines: list[int]) -> np.ndarray:
    table = np.full((len(cells), len(cells[0])), np.nan)
    for at, row in enumerate(cells):
        try:
            table[at] = list(map(plain_number, row))
        except ValueError:
            continue
    wrong = ~(np.isfinite(table) & (table >= 0)).all(axis=1)
    if wrong.any():
        named = name_some([lines[at] for at in np.flatnonzero(wrong)])
        raise OwnerwiseError(f"{path}, line {named}: expected counts of at least 0")
    return table


def _by_budget(path: Path, keys: list[str], plan: Plan) -> np.ndarray:
    """Return the rows of the file in ascending order of epsilon."""
    try:
        given = np.array(list(map(plain_number, keys)))
    except ValueError:
        given = np.zeros(0)
    known = np.unique(plan.targets)
    if not np.array_equal(np.sort(given), known):
        raise OwnerwiseError(
            f"{path}: the epsilons are not those of the run; expected one row for each of "
            f"{name_some(known, '{:g}'.format, shown=10)}"
        )
    return np.argsort(given)


def _by_owner(path: Path, keys: list[str], plan: Plan) -> np.ndarray:
    """Return the rows of the file in the order of the plan's owners.

    A plan that was read from a run folder has no ids, but a hash of them.
    """
    problems = Problems()
    numbered = text_ids(keys)
    for ids in (numbered, np.array(keys)) if numbered.dtype.kind == "i" else (as_array(keys),):
        ids = as_ids(ids, str(path), problems)
        problems.raise_()
        assert ids is not None
        order = np.argsort(ids, kind="stable")
        if _are_owners(ids[order], plan):
            return order
    raise OwnerwiseError(
        f"{path}: the owners are not those of the run; expected exactly one row for each of the "
        f"{len(plan.targets)} owners, with the ids that were used in training"
    )


def _are_owners(ids: np.ndarray, plan: Plan) -> bool:
    if plan.owners is not None:
        return bool(np.array_equal(ids, plan.owners.ids))
    if len(ids) != len(plan.targets) or len(np.unique(ids)) < len(ids):
        return False
    return Owners.fingerprint_of(ids, plan.records, plan.shared) == plan.owners_fingerprint
