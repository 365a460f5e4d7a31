"""The records in an experiment, their owners and budgets, and how methods change them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path

import numpy as np

from ownerwise.config.build import load_data, make_owners, split_records
from ownerwise.config.extraction import with_features
from ownerwise.config.reading import Config
from ownerwise.data import (
    Assignment,
    DataSet,
    Records,
)
from ownerwise.owners import (
    Owners,
)
from ownerwise_reproduction.data.assignments import flip_labels
from ownerwise_reproduction.data.sources import DATA_VARIABLE


@dataclass(frozen=True, eq=False)
class Population:
    """Training records with their owners and budgets, and the records to evaluate on.

    Attributes:
        data: the data set; `data.train` contains the training records.
        record_owner: owner id of each training record.
        epsilon: budget of each training record's owner.
        delta: delta for all owners.
        assignment: how validation and test records are grouped.
        validation: records evaluated during training.
        test: records evaluated at the end; None if the validation records are used for this too.
    """

    data: DataSet
    record_owner: np.ndarray
    epsilon: np.ndarray
    delta: float
    assignment: Assignment
    validation: Records
    test: Records | None

    def __len__(self) -> int:
        return len(self.record_owner)

    def owners(self) -> Owners:
        """Return the owners with their records."""
        _, first = np.unique(self.record_owner, return_index=True)
        return Owners(self.record_owner, self.epsilon[first], self.delta)

    def keep(self, which: np.ndarray) -> Population:
        """Return a copy of the population with only the training records that `which` selects."""
        return replace(
            self,
            data=replace(self.data, train=self.data.train.take(which)),
            record_owner=self.record_owner[which],
            epsilon=self.epsilon[which],
        )

    def with_budgets(self, epsilon: np.ndarray) -> Population:
        """Return a copy of the population with the given budgets, one per record."""
        return replace(self, epsilon=np.asarray(epsilon, dtype=np.float64))

    @property
    def lax(self) -> np.ndarray:
        """Mask of the lax owners' records.

        Lax owners are those whose budget is at least the mean budget of all owners.
        """
        _, first = np.unique(self.record_owner, return_index=True)
        return self.epsilon >= self.epsilon[first].mean() - 1e-12


def populate(
    config: Config, label_noise: float = 0.0, data_dir: str | PathLike | None = None
) -> Population:
    """Return the population for a configuration.

    Labels are flipped after owners are assigned, so every record stays with the owner of its true
    label.
    """
    place = os.environ.get(DATA_VARIABLE) if data_dir is None else os.fspath(data_dir)
    data, validation, test = _read(json.dumps(config["data"]), place)
    assert validation is not None
    assignment, owners = make_owners(config, data)
    assert owners.record_owner_index is not None
    if label_noise:
        seed = config["run"]["seed"]
        targets = flip_labels(data.train.targets, label_noise, len(data.classes), seed)
        data = replace(data, train=replace(data.train, targets=targets))
    return Population(
        data,
        owners.ids[owners.record_owner_index],
        owners.epsilon[owners.record_owner_index],
        float(owners.delta[0]),
        assignment,
        validation,
        test,
    )


@lru_cache(maxsize=1)
def _read(settings: str, place: str | None) -> tuple[DataSet, Records | None, Records | None]:
    """Return the data, the validation and the test records, with features if these are asked for.

    They are read once per process and reused by later runs.
    """
    config = Config({"data": json.loads(settings)}, Path(), "data")
    return with_features(*split_records(load_data(config, place), config["data"]), config["data"])
