"""Runs: the result of a training, in memory or in its own folder.

Imports owners, planning, mechanisms and step. `Run.report` and `Run.card` import the report when
called.
"""

from ownerwise.runs.environment import environment
from ownerwise.runs.folders import drop_older_checkpoints, folder_problems, holds_a_run
from ownerwise.runs.run import CARD, HISTORY, PLAN, REPORT, Run, default_label
from ownerwise.runs.settings import describe_function

__all__ = [
    "CARD",
    "HISTORY",
    "PLAN",
    "REPORT",
    "Run",
    "default_label",
    "describe_function",
    "drop_older_checkpoints",
    "environment",
    "folder_problems",
    "holds_a_run",
]
