"""Assign each record to a row: row k for record k, or a secret row out of a public number of rows.

The rounding of a row in a matrix product depends on its position and on the number of rows. A
hardened plan therefore fixes the number of rows: the records are placed in distinct, secret random
rows, and the other rows stay empty. Formal guarantee (docs/proofs/arithmetic.md): two neighbouring
batches can be coupled so that all common records are in the same rows. Then every kernel sees the
same numbers in the same places except in one row, and if the result of a row does not depend on the
contents of other rows, no other record's output, loss or norm changes by even one bit.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.batches import Batch
from ownerwise.batches.trees import map_tensors
from ownerwise.gradients import Segments
from ownerwise.randomness import StepStream, random_order
from ownerwise.step.checks import inputs_and_targets


@dataclass(frozen=True)
class Rows:
    """A batch whose records have been assigned to rows.

    Attributes:
        inputs, targets: tensors, or nested structures of tensors, arranged in these rows.
        owner_index: holder (`plan.holders`) of each element: each record, or each drawn owner.
        segments: the rows of each element; None if every record is an element.
        where: row of each record; None if record k is in row k and no row is empty.
        occupied: 1.0 for rows with a record, 0.0 for empty ones; None if no row is empty. With
            `segments`, one value per element.
        total: number of rows of the whole batch, in all processes.
    """

    inputs: Any
    targets: Any
    owner_index: np.ndarray
    segments: Segments | None = None
    where: np.ndarray | None = None
    occupied: np.ndarray | None = None
    _: KW_ONLY
    total: int

    def __len__(self) -> int:
        if self.segments is not None:
            return self.segments.rows
        return len(self.owner_index) if self.occupied is None else len(self.occupied)

    def spread(self, values: np.ndarray, empty: float) -> np.ndarray:
        """Return one value per row, given one per record."""
        if self.where is None:
            return values
        spread = np.full(len(self), empty, dtype=values.dtype)
        spread[self.where] = values
        return spread

    def of_records(self, values: np.ndarray) -> np.ndarray:
        """Return one value per record, given one per row."""
        return values if self.where is None else values[self.where]


def place(
    batch: Batch,
    rows: int | None,
    stream: StepStream | None,
    declared: np.ndarray | None = None,
) -> Rows:
    """Assign each record in the batch to its own row, out of `rows` rows in total.

    If several processes share the batch, its secret rows were drawn with the batch, and row k of
    all is row k // count of process k % count.

    Args:
        batch: the batch, with at most `rows` records.
        rows: public number of rows; None for exactly one row per record, in order.
        stream: secret random numbers used to choose the rows. If None, record k is placed in row k,
            which is NOT private and is meant for research.
        declared: declared number of records of each owner, if every step uses all owners. Each of
            them then has this number of rows, which the owner's own records fill; an owner without
            records leaves them empty. So the rows of the others do not depend on an owner.
    """
    inputs, targets = inputs_and_targets(batch)
    if batch.by_owner and declared is not None and rows is not None:
        return _owner_rows(batch, inputs, targets, declared)
    if batch.by_owner:
        owners, sizes = batch.elements()
        return Rows(inputs, targets, owners, Segments(sizes), total=batch.records)
    if rows is None:
        return Rows(inputs, targets, batch.owner_index, total=batch.records)
    total, share = rows, batch.share
    if share is not None:
        assert share.rows is not None
        where = share.rows[share.own] // share.processes.count
        rows = len(range(share.processes.rank, total, share.processes.count))
    else:
        order = np.arange(rows) if stream is None else random_order(stream, rows)
        where = order[: len(batch)]
    index = torch.from_numpy(where)

    def placed(records: Tensor) -> Tensor:
        empty = records.new_zeros((rows, *records.shape[1:]))
        return empty.index_copy_(0, index.to(records.device), records)

    occupied = np.zeros(rows)
    occupied[where] = 1.0
    inputs, targets = map_tensors(placed, (inputs, targets))
    return Rows(inputs, targets, batch.owner_index, None, where, occupied, total=total)


def _owner_rows(batch: Batch, inputs: Any, targets: Any, declared: np.ndarray) -> Rows:
    """Place the records of each owner in rows of their own, whose number is public.

    An owner with fewer records than declared repeats them; records beyond the declared number are
    left out. Both depend on the owner's own records only.
    """
    present, sizes = batch.elements()
    owners = np.flatnonzero(declared)
    counts = np.zeros(len(declared), dtype=np.int64)
    counts[present] = sizes.numpy()
    first = np.zeros(len(declared), dtype=np.int64)
    first[present] = np.cumsum(sizes.numpy()) - sizes.numpy()
    lengths = declared[owners]
    owner = np.repeat(owners, lengths)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    there = counts[owner] > 0
    source = np.where(there, first[owner] + number % np.maximum(counts[owner], 1), 0)
    index, empty = torch.from_numpy(source), torch.from_numpy(~there)

    def placed(records: Tensor) -> Tensor:
        rows = records.index_select(0, index.to(records.device))
        return (
            rows
            if there.all()
            else rows.index_fill_(0, empty.nonzero().flatten().to(records.device), 0)
        )

    inputs, targets = map_tensors(placed, (inputs, targets))
    segments = Segments(torch.from_numpy(lengths))
    occupied = (counts[owners] > 0).astype(np.float64)
    return Rows(inputs, targets, owners, segments, None, occupied, total=segments.rows)
