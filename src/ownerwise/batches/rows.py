"""Kinds of data from which batches can be drawn, and access to their rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from ownerwise.batches.trees import as_dicts, leaves, same_tensors, take, without_rows
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.torch_internals import pytree

if TYPE_CHECKING:
    from ownerwise.planning import Plan

_REPETITIONS = 16  # calls to collate: random masking is unlikely to pick the same tokens each time
Collate = Callable[[list[Any]], Any]
"""collate(samples) combines a Dataset's samples into one batch."""

COLLATE_NEEDS_DATASET = "collate= applies only to a Dataset: rows of arrays do not need collating"


class NamedArrays(Dataset):
    """The records of (X, y) where X, y or both are mappings from names to arrays."""

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.arrays = as_dicts(arrays)  # public, so that marks of these arrays are found

    def __len__(self) -> int:
        return len(leaves(self.arrays)[0])

    def __getitem__(self, number: int) -> Any:
        row = (lambda array: array[number]) if number < len(self) else _beyond
        return pytree.tree_map(row, self.arrays)

    @staticmethod
    def of(data: Any) -> Any:
        """Return such data as a Dataset, and any other data as it is."""
        if not (isinstance(data, tuple) and any(isinstance(part, Mapping) for part in data)):
            return data
        named = as_dicts(data)
        lengths = {
            array.shape[0] if getattr(array, "shape", ()) else 0
            for array in leaves(named)
            if isinstance(array, Tensor | np.ndarray)
        }
        others = [type(a).__name__ for a in leaves(named) if not isinstance(a, Tensor | np.ndarray)]
        empty = any(isinstance(part, Mapping) and not part for part in data)
        if empty or others or len(lengths) != 1:
            found = "has no rows" if empty else f"has {sorted(lengths)} rows (not private)"
            found = f"contains {name_some(others)}" if others else found
            raise OwnerwiseError(
                f"the data is a mapping that {found}; expected tensors or arrays with one row per "
                "record each (tokenizers return them with return_tensors='pt', padding=True)"
            )
        return NamedArrays(named)


def _beyond(array: Any) -> Any:
    raise IndexError("no such record")


class ArrayRows:
    """Rows of tensors or arrays; each array is indexed once per batch."""

    def __init__(self, arrays: tuple[torch.Tensor | np.ndarray, ...]) -> None:
        self._arrays = arrays

    def __getitem__(self, indices: np.ndarray) -> tuple[torch.Tensor, ...]:
        return tuple(
            array[torch.from_numpy(indices).to(array.device)]
            if isinstance(array, torch.Tensor)
            else torch.from_numpy(array[indices])
            for array in self._arrays
        )


@dataclass(frozen=True)
class Unloaded:
    """A placeholder for the data of a batch that could not be loaded; the step rejects it.

    It keeps only the type of the error: messages and tracebacks may name a record, and which
    records a batch contains is private.
    """

    error: str


@dataclass(frozen=True, eq=False)
class Part:
    """Some of a batch's records, whose rows change when they are collated separately.

    Attributes:
        positions: positions of these records in the batch, int64.
        data: the result of collating them without the rest of the batch.
        random: whether the collate function draws random numbers.
    """

    positions: np.ndarray = field(repr=False)
    data: Any = field(repr=False)
    random: bool = field(repr=False)


class DatasetRows:
    """Collated rows of a map-style Dataset; each DataLoader worker has its own copy."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self.foreign = collate is not None  # torch's default only stacks

    def __getitem__(self, request: tuple[np.ndarray, np.ndarray]) -> tuple[Any, Part | None]:
        """Return a batch's rows, and the part if collating it separately changes its rows.

        Args:
            request: record numbers of the batch, and the positions of the part's records among
                them.
        """
        indices, positions = request
        try:
            # an empty batch takes only its dtypes and trailing shapes from record 0
            samples = self._samples(indices.tolist() or [0])
            chosen = [copy.deepcopy(samples[position]) for position in positions.tolist()]
            data = self._collated(samples)
            if not len(indices):
                return without_rows(data), None
            return data, self._part(chosen, positions, data)
        except Exception as error:
            return Unloaded(type(error).__name__), None

    def _samples(self, numbers: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(numbers)
        return [self._dataset[number] for number in numbers]

    def _collated(self, samples: list[Any]) -> Any:
        data = as_dicts(self._collate(samples))
        return tuple(data) if isinstance(data, list) else data

    def _part(self, samples: list[Any], positions: np.ndarray, data: Any) -> Part | None:
        """Return the part if collating it separately changes the rows of its records."""
        if not samples or not all(isinstance(leaf, Tensor) for leaf in leaves(data)):
            return None
        apart = self._collated(copy.deepcopy(samples))
        if same_tensors(apart, take(data, positions.tolist())):
            return None
        again = (self._collated(copy.deepcopy(samples)) for _ in range(_REPETITIONS))
        random = any(not same_tensors(apart, other) for other in again)
        return Part(positions, apart, random)


def rows_of(dataset: Any, records: int, collate: Collate | None) -> ArrayRows | DatasetRows:
    """Return the rows of a dataset, or raise an error if it cannot supply `records` records."""
    dataset = NamedArrays.of(dataset)
    if problems := data_problems(dataset, records):
        raise OwnerwiseError(problems)
    arrays = arrays_of(dataset, collate)
    if arrays is None:
        return DatasetRows(dataset, collate)
    if collate is not None:
        raise OwnerwiseError(COLLATE_NEEDS_DATASET)
    return ArrayRows(arrays)


def arrays_of(data: Any, collate: Collate | None = None) -> Any:
    """Return in-memory data as a tuple of arrays, or None for a Dataset, which loads its rows."""
    if type(data) is TensorDataset and collate is None:  # a subclass may transform its rows
        return data.tensors
    if isinstance(data, torch.Tensor | np.ndarray):
        return (data,)
    return data if isinstance(data, tuple) else None


def is_map_style(data: Any) -> bool:
    """Return whether rows can be fetched by index, as from a Dataset.

    This is not possible for a table indexed by column, a DataLoader, an iterator or a dictionary.
    """
    by_column = isinstance(data, dict) or hasattr(data, "iloc")
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return indexed and not by_column and not isinstance(data, DataLoader)


def ownerless_problems(plan: Plan) -> list[str]:
    """Return an error message if the plan does not state which owner each record belongs to."""
    if plan.owners is None:
        return ["the plan has no owners: load it with Plan.load(path, owners=)"]
    if plan.owners.record_owner_index is None:
        return [
            "the plan's owners have no records: pass the owner id of each record to Owners, or "
            "attach the records with owners.with_records(ids) before planning"
        ]
    return []


def surplus_problems(plan: Plan) -> list[str]:
    """Return an error message if owners have more records than declared.

    If records are sampled, the epsilon per owner holds for the declared numbers, and so do the
    bounds on the batch size (hardened plans and weights). Owners who share records declare their
    number for each set of owners. If owners are sampled, the number of their records does not
    matter.
    """
    owners = plan.owners
    if plan.sampling == "owner" or owners is None or owners.record_owner_index is None:
        return []
    declared = plan.holders.elements
    counts = np.bincount(owners.record_owner_index, minlength=len(declared))
    more = np.flatnonzero(counts > declared)
    if not len(more):
        return []
    return [
        f"owner {name_some(more, owners.name_of)} has more records than declared (this message is "
        "itself not private), but the epsilon per owner holds for the declared numbers only: keep "
        "at most as many (owners.bound(max_records=...), or owners.max_records in a "
        "configuration), or declare more (Owners(..., records=)) and make a new plan"
    ]


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
        return [
            f"a {kind} chooses the records itself, but the plan must choose them: pass only the "
            "dataset"
        ]
    if isinstance(dataset, IterableDataset) or hasattr(dataset, "__next__"):
        return [
            f"a {kind} fixes the order of the records, but Poisson batches need access by index: "
            "pass a map-style Dataset (__getitem__ and __len__)"
        ]
    if isinstance(dataset, tuple):
        named = [(f"array {number} in the data", array) for number, array in enumerate(dataset)]
        problems = [text for name, array in named for text in _array_problems(name, array, records)]
        return problems if dataset else ["the data is an empty tuple: pass (X, y)"]
    if not is_map_style(dataset):
        return [
            f"a {kind} does not support access by index: pass (X, y) as tensors or arrays, or a "
            "Dataset with __getitem__ and __len__"
        ]
    return _length_problems(f"the {kind}", len(dataset), records)


def described(array: Any) -> str:
    """Format a dtype and shape without the number of records, such as "float32 [records, 5]"."""
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
        f"{name} has {rows} rows, but the plan's owners have {records} records (not private): "
        "pass exactly the rows whose owner ids were passed, in the same order"
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def shape_name(shape: torch.Size) -> str:
    """Format a shape without the (private) number of records, such as "[records, 5]"."""
    return f"[{', '.join(map(str, ('records', *shape[1:])))}]"
