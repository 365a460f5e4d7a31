"""Private training where every data owner sets an own privacy budget."""

from typing import TYPE_CHECKING, Any

from ownerwise import data, models
from ownerwise.accounting import Schedule
from ownerwise.batches import (
    Batch,
    PoissonBatches,
)
from ownerwise.errors import AccountingError, BudgetError, OwnerwiseError, PlanError, PrivacyWarning
from ownerwise.gradients import check
from ownerwise.mechanisms import (
    INO,
    AutoS,
    BudgetAware,
    ImportanceSampling,
    Psac,
    Standard,
    constraints,
    ino_sum,
)
from ownerwise.mechanisms.constraints import Partition, RateConstraints, rate
from ownerwise.owners import (
    Owners,
)
from ownerwise.planning import (
    Plan,
    Verification,
    plan,
)
from ownerwise.randomness import (
    SecretStream,
)
from ownerwise.runs import (
    Run,
)
from ownerwise.step import (
    PrivateStep,
)
from ownerwise.training import (
    Trainer,
)

if TYPE_CHECKING:
    from ownerwise.estimators import PrivateClassifier

__version__ = "0.1.0"

__all__ = [
    "INO",
    "AccountingError",
    "AutoS",
    "Batch",
    "BudgetAware",
    "BudgetError",
    "ImportanceSampling",
    "Owners",
    "OwnerwiseError",
    "Partition",
    "Plan",
    "PlanError",
    "PoissonBatches",
    "PrivacyWarning",
    "PrivateClassifier",
    "PrivateStep",
    "Psac",
    "RateConstraints",
    "Run",
    "Schedule",
    "SecretStream",
    "Standard",
    "Trainer",
    "Verification",
    "check",
    "constraints",
    "data",
    "ino_sum",
    "models",
    "plan",
    "rate",
]


def __getattr__(name: str) -> Any:
    if name == "PrivateClassifier":  # scikit-learn is an optional extra
        from ownerwise.estimators import PrivateClassifier

        return PrivateClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
