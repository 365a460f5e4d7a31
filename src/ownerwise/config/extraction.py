"""Replace the inputs of a configured data set with features that have no privacy cost."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ownerwise.data import DataSet, Records
from ownerwise.models import features


def with_features(
    data: DataSet,
    validation: Records | None,
    test: Records | None,
    settings: Mapping[str, Any],
) -> tuple[DataSet, Records | None, Records | None]:
    """Return the data, the validation and the test records with features as inputs.

    The records have already been split: the split depends on the exact bytes of a record, whereas
    the last bits of its features may depend on the batch in which they were computed. Without an
    `extractor` in the settings, everything is returned unchanged.
    """
    if "extractor" not in settings:
        return data, validation, test
    options = dict(settings["extractor"])
    extractor = features.build(options.pop("name", ""), **options)

    @functools.cache  # the validation records may be the test part of the data set
    def extracted(records: Records) -> Records:
        inputs = features.extract(extractor, torch.from_numpy(records.inputs))
        return replace(records, inputs=inputs.numpy())

    parts = {name: extracted(records) for name, records in data.parts().items()}
    shape = list(parts["train"].inputs.shape[1:])
    form = f"float32 features {shape}"
    pretraining = getattr(extractor, "pretraining", "")
    data = replace(data, form=form, pretraining=pretraining, **parts)
    return (
        data,
        None if validation is None else extracted(validation),
        None if test is None else extracted(test),
    )
