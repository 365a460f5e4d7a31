"""Metrics per class and group on validation and test records, which no guarantee covers.

This package imports batches and mechanisms (losses and constraints), but not the private step.
"""

from ownerwise.evaluation.metrics import (
    FEW_GROUPS,
    Evaluation,
    Predict,
    predicted_classes,
    trial_problems,
)

__all__ = [
    "FEW_GROUPS",
    "Evaluation",
    "Predict",
    "predicted_classes",
    "trial_problems",
]
