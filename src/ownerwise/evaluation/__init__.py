"""Metrics per class and group on validation and test records, which no guarantee covers.

This package imports batches and mechanisms (losses and constraints), but not the private step.
"""

from ownerwise.evaluation.classification import classification
from ownerwise.evaluation.groups import SMALLEST_GROUP, budget_ranges, is_pooled
from ownerwise.evaluation.intervals import Estimate
from ownerwise.evaluation.metrics import (
    FEW_GROUPS,
    Evaluation,
    Predict,
    predicted_classes,
    trial_problems,
)
from ownerwise.mechanisms.target_checks import run_on_first

__all__ = [
    "FEW_GROUPS",
    "SMALLEST_GROUP",
    "Estimate",
    "Evaluation",
    "Predict",
    "budget_ranges",
    "classification",
    "is_pooled",
    "predicted_classes",
    "run_on_first",
    "trial_problems",
]
