"""Batches: Poisson batches for a plan, the kinds of data that can supply them, and access to rows.

This package may import owners, planning and randomness, but not models or gradients.
"""

from ownerwise.batches.poisson import Batch, PoissonBatches
from ownerwise.batches.rows import (
    COLLATE_NEEDS_DATASET,
    Part,
    Unloaded,
    arrays_of,
    data_problems,
    described,
    dtype_name,
    is_map_style,
    ownerless_problems,
    shape_name,
)
from ownerwise.batches.trees import row_counts, same_tensors, take

__all__ = [
    "COLLATE_NEEDS_DATASET",
    "Batch",
    "Part",
    "PoissonBatches",
    "Unloaded",
    "arrays_of",
    "data_problems",
    "described",
    "dtype_name",
    "is_map_style",
    "ownerless_problems",
    "row_counts",
    "same_tensors",
    "shape_name",
    "take",
]
