"""Training: the Trainer, a loop around the private step, with its checks and records.

Imports every room up to runs, and nothing of report, config or cli.
"""

from ownerwise.training.learning_rates import schedule_problems
from ownerwise.training.loggers import LOGGERS
from ownerwise.training.trainer import Trainer

__all__ = [
    "LOGGERS",
    "Trainer",
    "schedule_problems",
]
