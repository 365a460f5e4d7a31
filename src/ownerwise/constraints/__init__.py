"""Rate constraints: what the predictions of a private model must keep to, group by group.

`Partition` sorts records into cells, `rate` makes rates that add, subtract and compare, the
functions of `ready` are the usual constraints, and `RateConstraints` trains under them.
"""

from ownerwise.constraints.lagrangian import NO_CONSTRAINTS, PenalisedLoss, RateConstraints
from ownerwise.constraints.partition import Column, Condition, Partition
from ownerwise.constraints.rates import Constraint, Expression, Rate, rate
from ownerwise.constraints.ready import (
    demographic_parity,
    equal_opportunity,
    equalized_odds,
    error_rate,
    false_negative_rate,
    false_positive_rate,
    precision,
    recall,
    selection_rate,
)

__all__ = [
    "NO_CONSTRAINTS",
    "Column",
    "Condition",
    "Constraint",
    "Expression",
    "Partition",
    "PenalisedLoss",
    "Rate",
    "RateConstraints",
    "demographic_parity",
    "equal_opportunity",
    "equalized_odds",
    "error_rate",
    "false_negative_rate",
    "false_positive_rate",
    "precision",
    "rate",
    "recall",
    "selection_rate",
]
