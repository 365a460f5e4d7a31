"""Training: the Trainer, which is a loop around the private step, with checks and loggers.

This subpackage may import any subpackage up to runs, but never report, config or cli.
"""

from ownerwise.training.learning_rates import schedule_problems
from ownerwise.training.loggers import LOGGERS
from ownerwise.training.outside_the_plan import TRAINED_BEFORE, note_training
from ownerwise.training.trainer import Trainer

__all__ = [
    "LOGGERS",
    "TRAINED_BEFORE",
    "Trainer",
    "note_training",
    "schedule_problems",
]
