"""Kinds of data from which batches can be drawn, and access to their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

from ownerwise.batches.trees import without_rows
from ownerwise.errors import OwnerwiseError

if TYPE_CHECKING:
    from ownerwise.planning import Plan

COLLATE_NEEDS_DATASET = "collate= applies to a Dataset only: rows of arrays need no collating"


class ArrayRows:
    """Rows of tensors or arrays, each indexed once per batch."""

    def __init__(self, arrays: tuple[torch.Tensor | np.ndarray, ...]) -> None:
        self._arrays = arrays

    def __getitem__(self, indices: np.ndarray) -> tuple[torch.Tensor, ...]:
        return tuple(
            array[torch.from_numpy(indices).to(array.device)]
            if isinstance(array, torch.Tensor)
            else torch.from_numpy(array[indices])
            for array in self._arrays
        )


class DatasetRows:
    """Collated rows of a map-style Dataset; DataLoader workers hold a copy."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, indices: np.ndarray) -> Any:
        # an empty batch takes only its dtypes and trailing shapes from record 0
        numbers = indices.tolist() or [0]
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(numbers)
        else:
            samples = [self._dataset[number] for number in numbers]
        data = self._collate(samples)
        data = tuple(data) if isinstance(data, list) else data
        return data if len(indices) else without_rows(data)


def rows_of(
    dataset: Any, records: int, collate: Callable[[list[Any]], Any] | None
) -> ArrayRows | DatasetRows:
    """Return the rows of a data set, or raise if it does not have this number of records."""
    if problems := data_problems(dataset, records):
        raise OwnerwiseError(problems)
    if type(dataset) is TensorDataset and collate is None:  # a subclass may transform its rows
        dataset = dataset.tensors
    if isinstance(dataset, torch.Tensor | np.ndarray):
        dataset = (dataset,)
    if not isinstance(dataset, tuple):
        return DatasetRows(dataset, default_collate if collate is None else collate)
    if collate is not None:
        raise OwnerwiseError(COLLATE_NEEDS_DATASET)
    return ArrayRows(dataset)


def ownerless_problems(plan: Plan) -> list[str]:
    """Return the problem if the plan does not know which owner each record belongs to."""
    if plan.owners is None:
        return ["the plan has no owners: load it with Plan.load(path, owners=)"]
    if plan.owners.record_owner_index is None:
        return [
            "the plan's owners have no records: give Owners the owner id of each record, or attach "
            "the records with owners.with_records(ids) before planning"
        ]
    return []


def data_problems(dataset: Any, records: int) -> list[str]:
    """Return every reason why `dataset` cannot supply Poisson batches from `records` records."""
    kind = type(dataset).__name__
    if isinstance(dataset, torch.Tensor | np.ndarray):
        return _array_problems("the data", dataset, records)
    if isinstance(dataset, DataLoader) or hasattr(dataset, "batch_sampler"):
        return [
            f"a {kind} forms its own batches, but the privacy guarantee needs Poisson batches: "
            "pass loader.dataset, with collate=loader.collate_fn"
        ]
    if isinstance(dataset, Sampler):
        return [f"a {kind} chooses the records itself, but the plan must: pass only the dataset"]
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "__next__"):
        return [
            f"a {kind} fixes the order of the records, but Poisson batches need access by number: "
            "pass a map-style Dataset (__getitem__ and __len__)"
        ]
    if isinstance(dataset, tuple):
        named = [(f"array {number} in the data", array) for number, array in enumerate(dataset)]
        problems = [text for name, array in named for text in _array_problems(name, array, records)]
        return problems if dataset else ["the data is an empty tuple: pass (X, y)"]
    by_column = isinstance(dataset, dict) or hasattr(dataset, "iloc")
    if by_column or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return [
            f"a {kind} does not give records by number: pass (X, y) as tensors or arrays, or a "
            "Dataset with __getitem__ and __len__"
        ]
    return _length_problems(f"the {kind}", len(dataset), records)


def described(array: Any) -> str:
    """Return the dtype and shape, hiding the private number of records: "float32 [records, 5]"."""
    if not isinstance(array, Tensor):
        return f"a {type(array).__name__}"
    return f"{dtype_name(array.dtype)} {shape_name(array.shape)}"


def _array_problems(name: str, array: Any, records: int) -> list[str]:
    if not isinstance(array, torch.Tensor | np.ndarray):
        return [f"{name} is a {type(array).__name__}: convert it with numpy.asarray"]
    if isinstance(array, np.ndarray):
        try:
            torch.from_numpy(np.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            return [
                f"{name} has dtype {array.dtype}, which torch does not support: convert it "
                f"({error})"
            ]
    return _length_problems(name, array.shape[0] if array.ndim else 0, records)


def _length_problems(name: str, rows: int, records: int) -> list[str]:
    if rows == records:
        return []
    return [
        f"{name} has {rows} rows, but the plan's owners list {records} records: pass the rows for "
        "which the owner ids were given, in the same order"
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def shape_name(shape: torch.Size) -> str:
    """Return a shape, hiding the number of records, which is private: "[records, 5]"."""
    return f"[{', '.join(map(str, ('records', *shape[1:])))}]"
