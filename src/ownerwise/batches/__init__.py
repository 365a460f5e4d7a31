"""Batches: Poisson batches drawn from a plan, the kinds of data they accept, and rows of data.

Imports owners, planning and randomness; does not depend on models or gradients.
"""

from ownerwise.batches.poisson import Batch, PoissonBatches
from ownerwise.batches.rows import (
    COLLATE_NEEDS_DATASET,
    Part,
    Unloaded,
    data_problems,
    described,
    dtype_name,
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
    "data_problems",
    "described",
    "dtype_name",
    "ownerless_problems",
    "row_counts",
    "same_tensors",
    "shape_name",
    "take",
]
