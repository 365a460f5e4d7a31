"""Repair: corrections for the side effects of individual budgets.

With individual budgets, a model is tilted towards the owners with larger budgets. After training,
`Calibration` measures the tilt of the class biases on all records with equal weight, in a release
that the plan accounts for. `PullAdjustment` computes the tilt from public label counts instead.
This package may import owners, accounting, planning, batches, gradients and mechanisms.
"""

from ownerwise.repair.calibration import Calibration, class_logits, closing_for
from ownerwise.repair.folding import shifted, subtract_from_outputs, subtract_in_hook
from ownerwise.repair.named import CALIBRATIONS, REPAIRS, as_calibration, as_repair
from ownerwise.repair.pull import PullAdjustment

__all__ = [
    "CALIBRATIONS",
    "REPAIRS",
    "Calibration",
    "PullAdjustment",
    "as_calibration",
    "as_repair",
    "class_logits",
    "closing_for",
    "shifted",
    "subtract_from_outputs",
    "subtract_in_hook",
]
