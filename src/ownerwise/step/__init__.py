"""The private step, the only place where private data changes the model, and its checkpoints.

Imports planning, randomness, batches, gradients and mechanisms; nothing here knows about runs,
training loops, or folders other than the one it is given.
"""

from ownerwise.step.checkpoints import record_steps
from ownerwise.step.private_step import PrivateStep

__all__ = [
    "PrivateStep",
    "record_steps",
]
