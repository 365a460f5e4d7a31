"""Private training where every data owner sets an own privacy budget."""

from ownerwise.accounting import Schedule
from ownerwise.errors import (
    AccountingError,
    BudgetError,
    OwnerwiseError,
    PlanError,
    PrivacyWarning,
)
from ownerwise.owners import Owners
from ownerwise.planning import plan
from ownerwise.plans import Plan, Verification

__version__ = "0.1.0"

__all__ = [
    "AccountingError",
    "BudgetError",
    "Owners",
    "OwnerwiseError",
    "Plan",
    "PlanError",
    "PrivacyWarning",
    "Schedule",
    "Verification",
    "plan",
]
