"""Configuration files: their sections, how they are read, and how a run is prepared from them.

May import every room but the command line.
"""

from ownerwise.config.build import PreparedRun, prepare_run
from ownerwise.config.reading import read_config

__all__ = [
    "PreparedRun",
    "prepare_run",
    "read_config",
]
