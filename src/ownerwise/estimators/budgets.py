"""The owners of the records of one fit, with the budgets that an estimator was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import column_or_1d

from ownerwise.errors import Problems, name_some
from ownerwise.owners import Hints, Owners, as_array, flat_ids

_HINTS = Hints(record_owner="owners", levels="the estimators accept only numbers")


def owner_ids(given: Any) -> np.ndarray:
    """Return the owners of a fit's records; a cell may be a tuple of several ids."""
    cells = as_array(given)
    return column_or_1d(given if flat_ids(cells)[1] is None else cells)


def fit_owners(
    records: int, ids: np.ndarray | None, epsilon: Any, delta: Any, held_out: np.ndarray
) -> Owners:
    """Return the owners of a fit's records, except for the records in the mask `held_out`.

    Without `ids`, every record is its own owner.
    """
    problems = Problems()
    given = {"epsilon": epsilon, "delta": delta}
    if ids is None:
        ids = np.arange(records)
        problems.add(
            *(
                f"{name} maps owners to values, but fit was called without owners; call "
                "fit(X, y, owners=ids) with one id per record"
                for name, value in given.items()
                if isinstance(value, Mapping)
            )
        )
    if len(ids) != records:
        problems.add(f"{len(ids)} owner ids for {records} records; expected one id per record")
    problems.raise_()
    budgets = {name: _by_owner(name, value, ids, problems) for name, value in given.items()}
    problems.raise_()
    return Owners(ids[~held_out], **budgets, held_out=ids[held_out], hints=_HINTS)


def _by_owner(name: str, given: Any, ids: np.ndarray, problems: Problems) -> Any:
    """Return epsilon or delta for `Owners`, as a number or as a mapping for the owners present."""
    if isinstance(given, Mapping):
        present = set(flat_ids(ids)[0].tolist())
        # if they have no owner in common, Owners reports it
        return {owner: value for owner, value in given.items() if owner in present} or given
    if not np.ndim(given):
        return given
    values = np.asarray(given)
    if flat_ids(ids)[1] is not None:
        problems.add(
            f"{name} has one value per record, but records have several owners; expected one "
            "number, or a mapping {owner: value}"
        )
        return None
    if values.shape != ids.shape:
        problems.add(
            f"{name} has shape {list(values.shape)} for {len(ids)} records; expected one value "
            f"per record. If the data is split (cross-validation), pass a mapping {{owner: value}} "
            "and owners"
        )
        return None
    chosen: dict[Any, Any] = {}
    differing = {
        owner
        for owner, value in zip(ids.tolist(), values.tolist(), strict=True)
        if chosen.setdefault(owner, value) != value
    }
    if differing:
        problems.add(
            f"{name} differs between records of owner {name_some(sorted(differing))}; expected one "
            "value per owner, or a separate owner for every record"
        )
    return chosen
