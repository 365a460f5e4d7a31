"""The line that says whether the choice of settings was paid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ownerwise.runs import Run

NOT_ACCOUNTED = (
    "Decisions based on these metrics (settings, method, when to stop) are not accounted for; "
    "neither is a hyper-parameter search on the private records."
)
ACCOUNTED = (
    "Decisions based on these metrics (method, when to stop) are not accounted for. The choice "
    "among the candidates of the search is."
)
TIME_OF_SEARCH = "How long the search took, which tells something about the number of its runs."


def tuning_line(run: Run) -> str:
    """Return how the settings of a run were chosen, as far as this is known."""
    described: Mapping[str, Any] = run.config.get("tuning") or {}
    if run.plan.tuning is not None:
        return f"tuning: paid ({run.plan.tuning.words()}{_chosen(described)})"
    if described.get("kind") == "public":
        return f"tuning: on public data{_chosen(described)}"
    runs = 1 + run.config.get("earlier_trainings", 0)
    return f"tuning: not accounted ({runs} run{'s'[: runs != 1]})"


def tuning_lines(runs: Sequence[Run]) -> list[str]:
    """Return the lines of several runs, with the method's label where they differ."""
    lines = {run.label: tuning_line(run) for run in runs}
    if len(set(lines.values())) == 1:
        return list(lines.values())[:1]
    return [f"{label}: {line}" for label, line in lines.items()]


def decisions(run: Run) -> str:
    """Return which decisions the accounting does not cover."""
    return NOT_ACCOUNTED if run.plan.tuning is None else ACCOUNTED


def _chosen(described: Mapping[str, Any]) -> str:
    settings = described.get("settings") or {}
    if not settings:
        return ""
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"; chosen among {len(described.get('candidates', ()))} candidates: {chosen}"
