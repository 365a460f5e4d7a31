"""Training: the Trainer, a loop around the private step, and what it checks and records.

May import every room up to runs; never the report.
"""

from ownerwise.training.learning_rates import schedule_problems
from ownerwise.training.loggers import LOGGERS
from ownerwise.training.trainer import Trainer

__all__ = [
    "LOGGERS",
    "Trainer",
    "schedule_problems",
]
