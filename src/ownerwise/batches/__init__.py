"""Batches: Poisson batches for a plan, the kinds of data that can supply them, and access to rows.

This package may import owners, planning and randomness, but not models or gradients.
"""

from ownerwise.batches.alike import checksum, shared_rows
from ownerwise.batches.devices import Device, device_of, device_problems, moved
from ownerwise.batches.poisson import Batch, PoissonBatches
from ownerwise.batches.rows import (
    COLLATE_NEEDS_DATASET,
    ArrayRows,
    Collate,
    DatasetRows,
    NamedArrays,
    Part,
    Unloaded,
    arrays_of,
    data_problems,
    described,
    dtype_name,
    is_map_style,
    ownerless_problems,
    rows_of,
    shape_name,
    surplus_problems,
)
from ownerwise.batches.trees import row_counts, same_tensors, take

__all__ = [
    "COLLATE_NEEDS_DATASET",
    "ArrayRows",
    "Batch",
    "Collate",
    "DatasetRows",
    "Device",
    "NamedArrays",
    "Part",
    "PoissonBatches",
    "Unloaded",
    "arrays_of",
    "checksum",
    "data_problems",
    "described",
    "device_of",
    "device_problems",
    "dtype_name",
    "is_map_style",
    "moved",
    "ownerless_problems",
    "row_counts",
    "rows_of",
    "same_tensors",
    "shape_name",
    "shared_rows",
    "surplus_problems",
    "take",
]
