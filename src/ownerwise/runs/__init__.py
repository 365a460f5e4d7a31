"""Runs: the results of training, kept in memory or in run folders.

Imports the subpackages owners, planning, mechanisms and step. `Run.report` and `Run.card` import
the subpackage report only when they are called.
"""

from ownerwise.runs.environment import environment
from ownerwise.runs.folders import ALREADY_A_RUN, folder_problems, holds_a_run
from ownerwise.runs.reading import HISTORY, PLAN, RUN_KEY
from ownerwise.runs.run import CARD, REPORT, STEP_NOT_PRIVATE, Run, default_label
from ownerwise.runs.settings import describe_function

__all__ = [
    "ALREADY_A_RUN",
    "CARD",
    "HISTORY",
    "PLAN",
    "REPORT",
    "RUN_KEY",
    "STEP_NOT_PRIVATE",
    "Run",
    "default_label",
    "describe_function",
    "environment",
    "folder_problems",
    "holds_a_run",
]
