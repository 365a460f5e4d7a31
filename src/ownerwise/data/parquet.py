"""Parquet files larger than memory, read one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ownerwise.errors import OwnerwiseError, Problems, name_some
from ownerwise.files import write_whole

_NEEDS_PYARROW = "{}: Parquet needs pyarrow: pip install 'ownerwise[table]'"


class ParquetRecords(Dataset):
    """The records of a Parquet file as a Dataset that yields (x, y), for data larger than memory.

    A batch is read row group by row group, so memory holds one row group and the batch. Records
    that are drawn at random lie in nearly all row groups, so a step reads much of the file unless
    row groups are small: write them with about as many rows as fit into 1 MB, or convert the file
    once with `to_arrays`, which makes each record a single read.

    Args:
        path: the file; it must not change while it is in use.
        inputs: columns of numbers, in the order of the model's inputs, or a single column of lists
            of equal length. They become float32.
        target: column with the class of each record (whole numbers, from 0) or with numbers.

    For an example, see docs/how-to/devices.md.
    """

    def __init__(self, path: str | PathLike, inputs: str | Sequence[str], target: str):
        self._path = Path(path)
        self._columns = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target = target
        self._file: Any = None  # opened in each process on first use
        file = self._opened()
        sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._check()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the records with these numbers, reading each row group once."""
        wanted = np.asarray(numbers, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"record numbers must be below {len(self)}")
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        found: list[Any] = [None] * len(wanted)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            rows = wanted[places] - self._starts[group]
            inputs, targets = (
                torch.from_numpy(part[rows]) for part in self._read(group)
            )  # copies: the row group itself is freed
            for place, x, y in zip(places.tolist(), inputs, targets, strict=True):
                found[place] = (x, y)
        return found

    def to_arrays(self, folder: str | PathLike) -> tuple[np.ndarray, np.ndarray]:
        """Write inputs.npy and targets.npy to `folder`, and return them as memory-mapped arrays.

        Later, open them with `numpy.load(path, mmap_mode="r")`.
        """
        paths = [Path(folder) / name for name in ("inputs.npy", "targets.npy")]
        if existing := [path for path in paths if path.exists()]:
            raise OwnerwiseError(
                f'{existing[0]} exists already: open it with numpy.load(path, mmap_mode="r"), or '
                "choose another folder"
            )
        for number, path in enumerate(paths):

            def write(temporary: str, number: int = number) -> None:
                array: Any = None
                for start, stop, parts in self._groups():
                    part = parts[number]
                    if array is None:
                        shape = (len(self), *part.shape[1:])
                        array = np.lib.format.open_memmap(temporary, "w+", part.dtype, shape)
                    array[start:stop] = part
                array.flush()

            write_whole(path, write)
        inputs, targets = (np.load(path, mmap_mode="r") for path in paths)
        return inputs, targets

    def _groups(self) -> Iterator[tuple[int, int, tuple[np.ndarray, np.ndarray]]]:
        for group in range(len(self._starts) - 1):
            start, stop = self._starts[group : group + 2].tolist()
            yield start, stop, self._read(group)

    def _read(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a row group."""
        columns = [*self._columns, self._target]
        table = self._opened().read_row_group(group, columns=columns, use_threads=False)
        parts = [_numbers(table.column(name)) for name in columns]
        inputs = parts[0] if parts[0].ndim == 2 else np.stack(parts[:-1], axis=1)
        targets = parts[-1]
        kind = np.int64 if targets.dtype.kind in "biu" else np.float32
        return inputs.astype(np.float32, copy=False), targets.astype(kind)

    def _opened(self) -> Any:
        if self._file is None:
            try:
                from pyarrow.parquet import ParquetFile
            except ImportError:
                raise OwnerwiseError(_NEEDS_PYARROW.format(self._path)) from None
            try:
                self._file = ParquetFile(self._path, memory_map=True)
            except (OSError, ValueError) as error:
                raise OwnerwiseError(f"{self._path} cannot be read as Parquet: {error}") from None
        return self._file

    def _check(self) -> None:
        """Raise an error that lists all problems with the columns; the records are not read."""
        from pyarrow import types

        schema = self._opened().schema_arrow
        wanted = [*self._columns, self._target]
        problems = Problems()
        if missing := [name for name in wanted if name not in schema.names]:
            problems.add(
                f"{self._path} has no column {name_some(missing)}; its columns are "
                f"{name_some(schema.names)}"
            )
        if not self._columns:
            problems.add("inputs is empty: name at least one column")
        for name in wanted:
            if name not in schema.names:
                continue
            kind = schema.field(name).type
            listed = (types.is_list(kind) or types.is_fixed_size_list(kind)) and len(wanted) == 2
            inner = kind.value_type if listed and name != self._target else kind
            if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
                problems.add(
                    f"column {name} of {self._path} contains {kind}; expected numbers, or one "
                    "column of lists of numbers for all inputs: encode it when writing the file"
                )
        problems.raise_()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out: each worker process opens its own."""
        return {**self.__dict__, "_file": None}


def _numbers(column: Any) -> np.ndarray:
    """Return a column as numbers, [rows] or [rows, length of the lists]."""
    if column.null_count:
        raise ValueError("a column has empty cells")
    if not hasattr(column.type, "value_type"):
        return column.to_numpy()
    lists = column.combine_chunks()
    flat = lists.flatten()
    if flat.null_count or len(lists.value_lengths().unique()) > 1:
        raise ValueError("the lists of a column differ in length or have empty entries")
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
