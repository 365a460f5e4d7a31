"""Replace the inputs of a configured data set with features that have no privacy cost."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ownerwise.data import DataSet, Records
from ownerwise.errors import OwnerwiseError
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
    `extractor` in the settings, everything is returned unchanged; texts need one.
    """
    texts = data.train.are_texts
    extractor = _extractor(settings)
    if extractor is None:
        if texts:
            raise OwnerwiseError(
                f"the inputs of {data.name} are texts; expected an extractor that turns them into "
                'numbers: set data.extractor = { name = "minilm" }'
            )
        return data, validation, test
    if texts != features.reads_texts(extractor):
        given, expected = ("texts", "numbers") if texts else (data.form or "numbers", "texts")
        raise OwnerwiseError(
            f"data.extractor {settings['extractor']['name']!r} takes {expected}, but the inputs of "
            f"{data.name} are {given}: "
            + (
                'use an extractor of texts, such as "minilm"'
                if texts
                else 'declare a column of a table as "text", or load IMDb with '
                'data.options = { vocabulary = "none" }'
            )
        )

    @functools.cache  # the validation records may be the test part of the data set
    def extracted(records: Records) -> Records:
        return replace(records, inputs=_extract(extractor, records.inputs))

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


def features_of(inputs: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """Return the features of new records, or their inputs if the settings name no `extractor`."""
    extractor = _extractor(settings)
    return inputs if extractor is None else _extract(extractor, inputs)


def _extractor(settings: Mapping[str, Any]) -> nn.Module | None:
    if "extractor" not in settings:
        return None
    options = dict(settings["extractor"])
    return features.build(options.pop("name", ""), **options)


def _extract(extractor: nn.Module, inputs: np.ndarray) -> np.ndarray:
    given: Any = inputs if features.reads_texts(extractor) else torch.from_numpy(inputs)
    return features.extract(extractor, given).numpy()
