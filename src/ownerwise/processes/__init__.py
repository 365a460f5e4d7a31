"""Several processes that train one model together, or one process alone.

The processes are those of torch.distributed's default group, which torchrun starts and the script
or the command line initialises. Imports only errors and
torch_internals.
"""

from ownerwise.processes.draws import DrawsOfShare
from ownerwise.processes.group import ALONE, Processes
from ownerwise.processes.launch import joined, launched_processes, release_problems, speaks
from ownerwise.processes.shares import Share

__all__ = [
    "ALONE",
    "DrawsOfShare",
    "Processes",
    "Share",
    "joined",
    "launched_processes",
    "release_problems",
    "speaks",
]
