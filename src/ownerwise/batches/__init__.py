"""Batches: Poisson batches drawn from a plan, and what data may be.

May import owners, planning and randomness.
"""

from ownerwise.batches.batches import Batch, PoissonBatches
from ownerwise.batches.rows import (
    data_problems,
    described,
    dtype_name,
    ownerless_problems,
    row_counts,
    shape_name,
    take,
)

__all__ = [
    "Batch",
    "PoissonBatches",
    "data_problems",
    "described",
    "dtype_name",
    "ownerless_problems",
    "row_counts",
    "shape_name",
    "take",
]
