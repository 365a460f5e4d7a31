"""Rate constraints: bounds on prediction rates of a private model, overall and per group.

`Partition` sorts records into cells, `rate` builds rates that can be added, subtracted and
compared, `common` provides the usual constraints, and `RateConstraints` enforces them during
training. This package may import anything that `mechanisms` may import, as well as
`mechanisms.losses` and `mechanisms.plugs`.
"""

from ownerwise.mechanisms.constraints.common import (
    balanced_predictions,
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
from ownerwise.mechanisms.constraints.partition import Column, Condition, Partition
from ownerwise.mechanisms.constraints.rate_constraints import (
    PenalisedLoss,
    RateConstraints,
)
from ownerwise.mechanisms.constraints.rates import Constraint, Expression, Rate, rate

__all__ = [
    "Column",
    "Condition",
    "Constraint",
    "Expression",
    "Partition",
    "PenalisedLoss",
    "Rate",
    "RateConstraints",
    "balanced_predictions",
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
