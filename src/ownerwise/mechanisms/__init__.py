"""Mechanisms: components that can be plugged into the private step, each with a stated sensitivity.

This package contains clipping rules, INO weights and their scores, importance sampling, releases
and per-record losses; `constraints/` contains rate constraints. It imports accounting, planning,
processes, randomness, batches and gradients; the step imports `plugs`, never the reverse.
"""

from ownerwise.mechanisms.clip_norm_steering import (
    ClipNormSteering,
    adaptive_problems,
    steering_for,
)
from ownerwise.mechanisms.clipping import (
    SMALLEST_NORM,
    AutoS,
    ClippingRule,
    Psac,
    Standard,
)
from ownerwise.mechanisms.closing import Closing
from ownerwise.mechanisms.importance import ImportanceSampling
from ownerwise.mechanisms.individual_filter import WHOLE, IndividualFilter, Sensitivity
from ownerwise.mechanisms.ino import INO
from ownerwise.mechanisms.ino_sum import InoSum, ino_sum
from ownerwise.mechanisms.losses import (
    Loss,
    ignored_target,
    loss_problems,
    never_mixes,
    per_record,
    plain_loss,
)
from ownerwise.mechanisms.named import CLIPPING_RULES, LOSSES, RELEASES, WEIGHTS
from ownerwise.mechanisms.plugs import (
    Cells,
    Contributions,
    Peek,
    Plug,
    Randomness,
    Release,
    Steering,
    Weights,
    sum_of_unit_rows,
    unit_rows,
)
from ownerwise.mechanisms.proven import proven
from ownerwise.mechanisms.regression import REGRESSION_LOSSES, RegressionLoss
from ownerwise.mechanisms.scores import (
    ORDERS,
    BudgetAware,
    ByLoss,
    Score,
)
from ownerwise.mechanisms.statistics import (
    ColumnStatistics,
    Standardise,
    as_statistics,
    standardising_layers,
)
from ownerwise.mechanisms.steering import AcceptanceSteering
from ownerwise.mechanisms.tails import Beta, Steps, Tail

__all__ = [
    "CLIPPING_RULES",
    "INO",
    "LOSSES",
    "ORDERS",
    "REGRESSION_LOSSES",
    "RELEASES",
    "SMALLEST_NORM",
    "WEIGHTS",
    "WHOLE",
    "AcceptanceSteering",
    "AutoS",
    "Beta",
    "BudgetAware",
    "ByLoss",
    "Cells",
    "ClipNormSteering",
    "ClippingRule",
    "Closing",
    "ColumnStatistics",
    "Contributions",
    "ImportanceSampling",
    "IndividualFilter",
    "InoSum",
    "Loss",
    "Peek",
    "Plug",
    "Psac",
    "Randomness",
    "RegressionLoss",
    "Release",
    "Score",
    "Sensitivity",
    "Standard",
    "Standardise",
    "Steering",
    "Steps",
    "Tail",
    "Weights",
    "adaptive_problems",
    "as_statistics",
    "ignored_target",
    "ino_sum",
    "loss_problems",
    "never_mixes",
    "per_record",
    "plain_loss",
    "proven",
    "standardising_layers",
    "steering_for",
    "sum_of_unit_rows",
    "unit_rows",
]
