"""Split the data of a configuration, and find the owner of each record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ownerwise.config.reading import Config
from ownerwise.data import DataSet, Records
from ownerwise.data.splits import hold_out
from ownerwise.errors import OwnerwiseError


def owner_column(config: Config) -> str | None:
    """Return the column of the data with each record's owner; None if owners are assigned."""
    settings = config["owners"]
    return None if "assignment" in settings else settings.get("column", "owner")


def owners_of(records: Records, column: str, name: str) -> np.ndarray:
    """Return the owner of each record of the data set with this name."""
    if column not in records.columns:
        known = ", ".join(records.columns) or "none"
        raise OwnerwiseError(
            f"owners.column {column!r} is not in the data; {name} has the columns {known}"
        )
    return records.columns[column]


def split_records(
    data: DataSet,
    settings: Mapping[str, Any],
    by: str = "record",
    owners: np.ndarray | None = None,
) -> tuple[DataSet, Records | None, Records | None]:
    """Return the data (without held-out records), the validation records and the test records.

    With `validation_share`, each training record, or each of the `owners`, is held out with that
    probability, as determined by a public hash of the record or the owner's id alone (see
    `ownerwise.data.splits`); no guarantee covers the held-out records. Otherwise, the validation
    part of the data set is used or, if there is none, its test part, which is then not evaluated
    separately.
    """
    share = settings.get("validation_share")
    if share is None:
        return (
            (data, data.test, None)
            if data.validation is None
            else (data, data.validation, data.test)
        )
    train = data.train
    columns = [train.inputs, train.targets, *train.columns.values()]
    seed = settings.get("validation_seed", 0)
    held = hold_out(columns, owners, share, "validation", by=by, seed=seed)
    if not held.any() or held.all():
        raise OwnerwiseError(
            f"data.validation_share {share:g} holds out {'all' if held.any() else 'none'} of the "
            "training records; expected some, but not all: choose another share"
        )
    return replace(data, train=train.take(~held)), train.take(held), data.test
