"""Configuration files: their sections, how to read them, and how to prepare a run from them.

This package may import every other package except the command line.
"""

from ownerwise.config.build import PreparedRun, prepare_run
from ownerwise.config.prediction import build_again, read_inputs
from ownerwise.config.reading import read_config
from ownerwise.config.tuning import prepare_tuning

__all__ = [
    "PreparedRun",
    "build_again",
    "prepare_run",
    "prepare_tuning",
    "read_config",
    "read_inputs",
]
