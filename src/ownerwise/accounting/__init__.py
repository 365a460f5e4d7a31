"""Accounting: the privacy cost of a run for each owner.

This package may import only `errors`. `epsilon` is vectorised over owners (`per_owner`);
`owner_epsilon` is the same for all records of each owner together (`owner_pair`). A
`Schedule` defines the number of steps and the noise at each step. There are two accountants: `pld`
(tight, the default) and `rdp`. A `RunCost` combines a schedule, an accountant and additional
releases. `curves` inverts this cost for up to a million owners, and `reference` checks the results
with dp-accounting.
"""

from ownerwise.accounting.budgets import Budgets, record_levels
from ownerwise.accounting.curves import (
    MULTIPLIER,
    MULTIPLIER_RANGE,
    BudgetCurve,
    LogQuantity,
    multiplier_curve,
    rough_sampling_rate_curve,
    sampling_rate_curve,
)
from ownerwise.accounting.filters import FILTERS, filter_limits, gaussian_delta
from ownerwise.accounting.gaussian import gaussian_mu
from ownerwise.accounting.owner_epsilon import owner_epsilon
from ownerwise.accounting.per_owner import epsilon
from ownerwise.accounting.release import (
    NOISES,
    ClosingRelease,
    OpeningRelease,
    PaidRelease,
    joint_length,
    joint_multiplier,
)
from ownerwise.accounting.roots import find_root
from ownerwise.accounting.run_cost import (
    ACCOUNTANTS,
    LARGEST_OWNER_EPSILON,
    Exposure,
    RunCost,
)
from ownerwise.accounting.run_laws import SHAPES, RunLaw, law_problems, score_segment
from ownerwise.accounting.schedule import Schedule

__all__ = [
    "ACCOUNTANTS",
    "FILTERS",
    "LARGEST_OWNER_EPSILON",
    "MULTIPLIER",
    "MULTIPLIER_RANGE",
    "NOISES",
    "SHAPES",
    "BudgetCurve",
    "Budgets",
    "ClosingRelease",
    "Exposure",
    "LogQuantity",
    "OpeningRelease",
    "PaidRelease",
    "RunCost",
    "RunLaw",
    "Schedule",
    "epsilon",
    "filter_limits",
    "find_root",
    "gaussian_delta",
    "gaussian_mu",
    "joint_length",
    "joint_multiplier",
    "law_problems",
    "multiplier_curve",
    "owner_epsilon",
    "record_levels",
    "rough_sampling_rate_curve",
    "sampling_rate_curve",
    "score_segment",
]
