"""Evaluation: metrics of validation and test records, per class and group, without a guarantee.

May import mechanisms (for losses and constraints) and batches.
"""

from ownerwise.evaluation.metrics import (
    FEW_GROUPS,
    Collate,
    Evaluation,
    Predict,
    group_name,
    predicted_classes,
    trial_problems,
)

__all__ = [
    "FEW_GROUPS",
    "Collate",
    "Evaluation",
    "Predict",
    "group_name",
    "predicted_classes",
    "trial_problems",
]
