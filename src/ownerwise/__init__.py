"""Private training where every data owner sets an own privacy budget."""

from ownerwise.accounting import Schedule
from ownerwise.errors import (
    AccountingError,
    BudgetError,
    OwnerwiseError,
    PlanError,
    PrivacyWarning,
)
from ownerwise.gradients import check
from ownerwise.mechanisms import INO, AutoS, BudgetAware, Psac, Standard, ino_sum
from ownerwise.owners import Owners
from ownerwise.planning import plan
from ownerwise.plans import Plan, Verification
from ownerwise.random import SecretStream
from ownerwise.sampling import Batch, PoissonBatches
from ownerwise.step import PrivateStep

__version__ = "0.1.0"

__all__ = [
    "INO",
    "AccountingError",
    "AutoS",
    "Batch",
    "BudgetAware",
    "BudgetError",
    "Owners",
    "OwnerwiseError",
    "Plan",
    "PlanError",
    "PoissonBatches",
    "PrivacyWarning",
    "PrivateStep",
    "Psac",
    "Schedule",
    "SecretStream",
    "Standard",
    "Verification",
    "check",
    "ino_sum",
    "plan",
]
