"""What each use of a parameter contributes to the per-record gradients.

Each class here represents one form of contribution (outer products, kernels, look-ups, repeated
calls) and computes norms and weighted sums. This package may import the workspace, the memory
budget, layouts, precision, segments and saved tensors, but not the rules or the tape.
"""

from ownerwise.gradients.contributions.blocks import (
    BLOCK,
    sum_of_outer_products,
    sums_in_float64,
)
from ownerwise.gradients.contributions.contribution import (
    Contribution,
    Dense,
    few_rows,
    sketch_of,
)
from ownerwise.gradients.contributions.convolved import Convolved, Geometry
from ownerwise.gradients.contributions.ghost import shared_ghost_norms
from ownerwise.gradients.contributions.grouped import Grouped
from ownerwise.gradients.contributions.lookup import Lookup
from ownerwise.gradients.contributions.outer import Outer, SharedLeft
from ownerwise.gradients.contributions.repeated import Call, Repeated

__all__ = [
    "BLOCK",
    "Call",
    "Contribution",
    "Convolved",
    "Dense",
    "Geometry",
    "Grouped",
    "Lookup",
    "Outer",
    "Repeated",
    "SharedLeft",
    "few_rows",
    "shared_ghost_norms",
    "sketch_of",
    "sum_of_outer_products",
    "sums_in_float64",
]
