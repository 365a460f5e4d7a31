"""Whether several processes hold the same records, each under the same number.

Processes that shuffle or split their data with different random numbers would draw a record under
several numbers: it could be in a batch twice, and be counted for another owner. They are compared
by checksums of some records, before anything is spent.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ownerwise.batches.rows import ArrayRows, Collate, DatasetRows, Unloaded, rows_of
from ownerwise.batches.trees import leaves
from ownerwise.errors import OwnerwiseError
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import kept_generators

_IN_MEMORY, _LOADED = 256, 4  # records that are compared, evenly spaced
_LOADINGS = 4  # of each record; random augmentation makes a difference between them


def shared_rows(
    processes: Processes, data: object, plan: Plan, collate: Collate | None = None
) -> ArrayRows | DatasetRows:
    """Return the rows of the plan's data; raise an error if the processes hold different data.

    All processes must call this. An error in one of them is raised in all.
    """
    assert plan.owners is not None
    index = plan.owners.record_owner_index
    assert index is not None
    rows = processes.together(lambda: rows_of(data, len(index), collate))
    if not processes.several:
        return rows
    own = processes.together(
        lambda: (checksum([torch.tensor(index)]), _checksum_of_some(rows, len(index)))
    )
    owners, records = zip(*processes.all_of(own), strict=True)
    different = []
    if len(set(owners)) > 1:
        different.append("the owners of the records")
    if len(set(records)) > 1 and None not in records:
        different.append("the data")
    if different:
        raise OwnerwiseError(
            f"the {processes.count} processes differ in {' and '.join(different)}: each record "
            "must have the same number in all of them. Give a fixed seed to whatever shuffles or "
            "splits the records"
        )
    return rows


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of some tensors."""
    found = 0
    for tensor in tensors:
        bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found = zlib.crc32(bits.numpy().data, found)
    return found


def _checksum_of_some(rows: ArrayRows | DatasetRows, records: int) -> int | None:
    """Return a checksum of some records; None if they are not the same whenever they are loaded."""
    if not records:
        return None
    most = _IN_MEMORY if isinstance(rows, ArrayRows) else _LOADED
    some = np.unique(np.linspace(0, records - 1, most).astype(np.int64))
    if isinstance(rows, ArrayRows):
        return checksum(rows[some])
    with kept_generators():
        found = {_loaded(rows, some) for _ in range(_LOADINGS)}
    return found.pop() if len(found) == 1 else None


def _loaded(rows: DatasetRows, some: np.ndarray) -> int | None:
    data = rows[some, np.zeros(0, dtype=np.int64)][0]
    tensors = leaves(data)
    if isinstance(data, Unloaded) or not all(isinstance(leaf, Tensor) for leaf in tensors):
        return None  # the step says what is wrong
    return checksum(tensors)
