"""The model and the inputs of a run that was made from a configuration, for predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from ownerwise.config.build import with_statistics
from ownerwise.config.extraction import features_of
from ownerwise.data import NewRecords, load_inputs
from ownerwise.errors import OwnerwiseError
from ownerwise.models import BUILDERS

_NO_CONFIGURATION = (
    "the run was not made from a configuration that names a table, so the preprocessing of its "
    "records is unknown: pass the model's inputs as an array, run.predict(X)"
)


def build_again(settings: Mapping[str, Any]) -> nn.Module:
    """Return the untrained model of a run with these settings (`run.config`)."""
    with torch.random.fork_rng(devices=[]):
        network = BUILDERS.make(settings["settings"]["model"], **settings["prediction"]["sizes"])
    return with_statistics(network, settings["prediction"].get("numbers", 0))


def read_inputs(
    settings: Mapping[str, Any], path: str | PathLike, columns: Sequence[str] = ()
) -> NewRecords:
    """Return the inputs of new records, preprocessed like the training records of a run.

    Args:
        settings: the run's settings (`run.config`).
        path: a table with the run's input columns; any others are left out, as in training.
        columns: other columns to return.
    """
    data = settings.get("settings", {}).get("data", {})
    if "prediction" not in settings or "file" not in data:
        raise OwnerwiseError(_NO_CONFIGURATION)
    scale = data.get("scale", "ranges")
    if scale == "statistics":
        raise OwnerwiseError(
            "the run scaled its inputs by statistics of the training records (not private), which "
            "it does not keep: declare ranges (data.features), or pay for statistics "
            "(plan.statistics), and train again"
        )
    features = data.get("features") or settings["prediction"]["columns"]
    if not features:
        raise OwnerwiseError(
            "the run does not know which array its inputs are: list it in data.features"
        )
    missing = data.get("missing", ())
    read = load_inputs(path, features=features, missing=missing, scale=scale, columns=columns)
    return replace(read, inputs=features_of(read.inputs, data))
