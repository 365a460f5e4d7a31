"""Differentially private training in which each data owner sets their own privacy budget.

Public names are loaded on first use, so `import ownerwise` and `ownerwise --help` do not have to
load PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ownerwise import audit, data, models, pate
    from ownerwise.accounting import Schedule
    from ownerwise.batches import Batch, PoissonBatches
    from ownerwise.errors import (
        AccountingError,
        BudgetError,
        OwnerwiseError,
        PlanError,
        PrivacyWarning,
    )
    from ownerwise.estimators import PrivateClassifier, PrivateRegressor
    from ownerwise.gradients import check
    from ownerwise.mechanisms import (
        INO,
        AutoS,
        BudgetAware,
        ColumnStatistics,
        ImportanceSampling,
        Psac,
        RegressionLoss,
        Standard,
        Standardise,
        constraints,
        ino_sum,
    )
    from ownerwise.mechanisms.constraints import Partition, RateConstraints, rate
    from ownerwise.owners import Owners
    from ownerwise.planning import AdaptiveClipNorm, Plan, Verification, plan
    from ownerwise.randomness import SecretStream
    from ownerwise.repair import Calibration, PullAdjustment
    from ownerwise.runs import Run
    from ownerwise.step import Performance, PrivateStep
    from ownerwise.training import Trainer
    from ownerwise.tuning import PaidScore, PublicScore, tune

__version__ = "0.1.0"

__all__ = [
    "INO",
    "AccountingError",
    "AdaptiveClipNorm",
    "AutoS",
    "Batch",
    "BudgetAware",
    "BudgetError",
    "Calibration",
    "ColumnStatistics",
    "ImportanceSampling",
    "Owners",
    "OwnerwiseError",
    "PaidScore",
    "Partition",
    "Performance",
    "Plan",
    "PlanError",
    "PoissonBatches",
    "PrivacyWarning",
    "PrivateClassifier",
    "PrivateRegressor",
    "PrivateStep",
    "Psac",
    "PublicScore",
    "PullAdjustment",
    "RateConstraints",
    "RegressionLoss",
    "Run",
    "Schedule",
    "SecretStream",
    "Standard",
    "Standardise",
    "Trainer",
    "Verification",
    "audit",
    "check",
    "constraints",
    "data",
    "ino_sum",
    "models",
    "pate",
    "plan",
    "rate",
    "tune",
]

_NAMES_BY_ROOM = {
    "accounting": "Schedule",
    "batches": "Batch PoissonBatches",
    "errors": "AccountingError BudgetError OwnerwiseError PlanError PrivacyWarning",
    "estimators": "PrivateClassifier PrivateRegressor",
    "gradients": "check",
    "mechanisms": (
        "INO AutoS BudgetAware ColumnStatistics ImportanceSampling Psac RegressionLoss Standard "
        "Standardise constraints ino_sum"
    ),
    "mechanisms.constraints": "Partition RateConstraints rate",
    "owners": "Owners",
    "planning": "AdaptiveClipNorm Plan Verification plan",
    "randomness": "SecretStream",
    "repair": "Calibration PullAdjustment",
    "runs": "Run",
    "step": "Performance PrivateStep",
    "training": "Trainer",
    "tuning": "PaidScore PublicScore tune",
}
_ROOM_OF = {name: room for room, names in _NAMES_BY_ROOM.items() for name in names.split()}
_PUBLIC_ROOMS = ("audit", "data", "models", "pate")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
