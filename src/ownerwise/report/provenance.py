"""The section on the runs' settings, environment and hashes, and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ownerwise.errors import name_some
from ownerwise.report.blocks import Block, Definitions, Details, Table
from ownerwise.report.comparison import Comparison
from ownerwise.runs import Run
from ownerwise.runs.settings import flat
from ownerwise.wording import duration, whole

_SHOWN_ELSEWHERE = ("label", "group_budgets")


def provenance(comparison: Comparison) -> list[Block]:
    """Return the settings that the methods share, those that differ, and the environment."""
    facts = [_merged([_facts(run) for run in method.runs]) for method in comparison.methods]
    names = list(dict.fromkeys(name for of_method in facts for name in of_method))
    shared = {
        name: facts[0][name]
        for name in names
        if all(of_method.get(name) == facts[0].get(name) for of_method in facts)
    }
    parts: list[Block] = [Definitions(shared)]
    differing = [name for name in names if name not in shared]
    if differing:
        rows = [[name, *(of_method.get(name, "–") for of_method in facts)] for name in differing]
        headings = ["Setting", *(method.label for method in comparison.methods)]
        parts.append(Table("What differs", headings, rows, words=len(headings)))
    environment = _merged([_readable(run.environment) for run in comparison.runs])
    return [*parts, Details("Environment", Definitions(environment))]


def _facts(run: Run) -> dict[str, str]:
    config = run.config_without_ids.items()
    facts = _readable({k: v for k, v in config if k not in _SHOWN_ELSEWHERE})
    facts["steps spent"] = whole(run.steps_spent)
    facts["updates"] = whole(run.updates)
    facts["plan hash"] = run.plan.hash[:16]
    facts["hash of owners and declared counts"] = run.plan.owners_fingerprint[:16]
    seconds = run.history[-1].get("seconds") if run.history else None
    if seconds is not None:
        facts["training time (not private)"] = duration(seconds)
    return facts


def _merged(facts: list[dict[str, str]]) -> dict[str, str]:
    """Merge the facts about several runs into one mapping, listing all values where they differ."""
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    values = {name: [of_run[name] for of_run in facts if name in of_run] for name in names}
    return {name: name_some(list(dict.fromkeys(each)), shown=8) for name, each in values.items()}


def _readable(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings as a flat mapping of readable names to values."""
    return {
        name.replace("_", " "): f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in flat(settings, separator=": ")
        if value is not None and value != {}
    }
