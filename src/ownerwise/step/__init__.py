"""The private step: the one place where private data becomes an update, and its checkpoints.

May import every room before it: planning, randomness, batches, gradients and mechanisms.
"""

from ownerwise.step.checkpoints import record_steps
from ownerwise.step.private_step import PrivateStep

__all__ = [
    "PrivateStep",
    "record_steps",
]
