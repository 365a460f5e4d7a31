"""What is done to per-record gradients before they are summed."""

from ownerwise.mechanisms.clipping import AutoS, ClippingRule, Psac, Standard
from ownerwise.mechanisms.importance import ImportanceSampling
from ownerwise.mechanisms.ino import INO
from ownerwise.mechanisms.ino_sum import InoSum, ino_sum
from ownerwise.mechanisms.scores import (
    AtRandom,
    BudgetAware,
    ByLoss,
    ByNegativeLoss,
    OwnerThenLoss,
)
from ownerwise.mechanisms.steering import AcceptanceSteering
from ownerwise.mechanisms.tails import Beta, Steps, Tail

__all__ = [
    "INO",
    "AcceptanceSteering",
    "AtRandom",
    "AutoS",
    "Beta",
    "BudgetAware",
    "ByLoss",
    "ByNegativeLoss",
    "ClippingRule",
    "ImportanceSampling",
    "InoSum",
    "OwnerThenLoss",
    "Psac",
    "Standard",
    "Steps",
    "Tail",
    "ino_sum",
]
