"""Private tuning: the best of a secret random number of runs, paid for by every owner.

This package may import everything up to `training`. `candidates` fixes what is tried, `scores` says
how a run is judged, `trials` trains one candidate without leaving a trace, and `search` does the
rest. What a search costs is part of its plan (`planning.tuning`).
"""

from ownerwise.tuning.candidates import Candidate, expand
from ownerwise.tuning.scores import PaidScore, PublicScore
from ownerwise.tuning.search import prepare_search, tune
from ownerwise.tuning.trials import Search, folder_problems, search

__all__ = [
    "Candidate",
    "PaidScore",
    "PublicScore",
    "Search",
    "expand",
    "folder_problems",
    "prepare_search",
    "search",
    "tune",
]
