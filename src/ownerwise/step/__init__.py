"""The private step, its account and its checkpoints.

The step is the only place where private data changes the model. Imports the subpackages planning,
randomness, batches, gradients and mechanisms; nothing here depends on runs, training loops, or
folders other than the one passed to it.
"""

from ownerwise.step.account import Account
from ownerwise.step.account_file import OWN_FOLDER_ADVICE, Balance, read_account
from ownerwise.step.performance import Performance
from ownerwise.step.private_step import PrivateStep
from ownerwise.step.wrappers import unwrapped, wrapper_problems

__all__ = [
    "OWN_FOLDER_ADVICE",
    "Account",
    "Balance",
    "Performance",
    "PrivateStep",
    "read_account",
    "unwrapped",
    "wrapper_problems",
]
