"""What a private run costs each owner.

`epsilon` is vectorised over owners; `Schedule` says how many steps with how much noise. The two
accountants are `pld` (tight, default) and `rdp`; `chains` evaluates them for many owners at once,
`curves` and `roots` invert them for a million; `reference` checks both with dp-accounting.
"""

from ownerwise.accounting.curves import (
    BudgetCurve,
    Budgets,
    LogQuantity,
    gaussian_mu,
    multiplier_curve,
    rate_curve,
)
from ownerwise.accounting.per_owner import epsilon
from ownerwise.accounting.release import ACCOUNTANTS, NOISES, PaidRelease, joint_multiplier
from ownerwise.accounting.roots import find_root
from ownerwise.accounting.schedule import Schedule

__all__ = [
    "ACCOUNTANTS",
    "NOISES",
    "BudgetCurve",
    "Budgets",
    "LogQuantity",
    "PaidRelease",
    "Schedule",
    "epsilon",
    "find_root",
    "gaussian_mu",
    "joint_multiplier",
    "multiplier_curve",
    "rate_curve",
]
