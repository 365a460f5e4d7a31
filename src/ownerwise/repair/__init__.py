"""Repair: corrections for the side effects of individual budgets.

With individual budgets, a model is tilted towards the owners with larger budgets. After training,
`Calibration` measures the tilt of the class biases on all records with equal weight, in a release
that the plan accounts for. `PullAdjustment` computes the tilt from public label counts instead.
This package may import accounting, planning and mechanisms.
"""

from ownerwise.repair.calibration import Calibration, closing_for
from ownerwise.repair.folding import subtract_from_outputs, subtract_in_hook
from ownerwise.repair.named import CALIBRATIONS, as_calibration
from ownerwise.repair.pull import PullAdjustment

__all__ = [
    "CALIBRATIONS",
    "Calibration",
    "PullAdjustment",
    "as_calibration",
    "closing_for",
    "subtract_from_outputs",
    "subtract_in_hook",
]
