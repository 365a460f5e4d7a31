"""The provenance of results: commands to reproduce them, seeds, times and plans."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import Any

from ownerwise_reproduction.summary import Result, Study

PROGRAM = "ownerwise experiments"
TABLE = f"{PROGRAM} table --out reproduction/results"
"""The command that writes the pages about runs and searches."""

_MIXED = ("random_shares", "overlapping", "one_each")  # kinds of assignments


def command(
    action: str,
    setting: str,
    specs: Sequence[str],
    seeds: Sequence[int],
    profile: str = "paper",
    changes: Sequence[str] = (),
    options: Sequence[str] = (),
) -> str:
    """Return the command that runs methods in a setting.

    Args:
        action: "run" or "tune".
        setting: name of the setting.
        specs: methods with their arguments.
        seeds: seeds of the runs, which must be consecutive.
        profile: "paper" or "short".
        changes: strings "section.key=value".
        options: additional arguments.
    """
    words = [*PROGRAM.split(), action, setting, "--method", ",".join(specs)]
    words += ["--seeds", str(max(seeds) - min(seeds) + 1)]
    if min(seeds) > 0:
        words += ["--first-seed", str(min(seeds))]
    if profile != "paper":
        words += ["--profile", profile]
    for change in changes:
        words += ["--set", change]
    return shlex.join([*words, *options])


def asked(text: str) -> tuple[str, list[str]]:
    """Return the profile and the changes that a command specifies."""
    profile, changes = "paper", []
    words = shlex.split(text)
    for word, value in itertools.pairwise(words):
        if word == "--profile":
            profile = value
        elif word == "--set":
            changes.append(value)
    return profile, changes


def commands(study: Study) -> list[str]:
    """Return the commands for a study. Methods with the same seeds share one command."""
    together: dict[tuple[int, ...], list[str]] = {}
    for runs in study.methods.values():
        together.setdefault(tuple(run["seed"] for run in runs), []).append(runs[0]["spec"])
    first = study.first
    return [
        command("run", first["setting"], specs, seeds, first["profile"], first["changes"])
        for seeds, specs in together.items()
    ]


def is_mixed(study: Study) -> bool:
    """Return True if records in one group may have different budgets (groups are not owners)."""
    assignment = study.first["config"].get("owners", {}).get("assignment", {})
    return assignment.get("kind") in _MIXED


def origin(runs: Sequence[Result]) -> dict[str, Any]:
    """Return the seeds, times and plan hashes of a method's runs as JSON-compatible values.

    Training time covers all sessions of an interrupted run; wall time covers only its last session.
    `within_budgets` is None for plain SGD, which has no plans.
    """
    plans = plan_hashes(runs)
    return {
        "seeds": [run["seed"] for run in runs],
        "train_seconds": [run["train_seconds"] for run in runs],
        "wall_seconds": [run["wall_seconds"] for run in runs],
        "plans": plans,
        "within_budgets": all(run["within_budgets"] for run in runs) if plans else None,
    }


def plan_hashes(runs: Sequence[Result]) -> list[str]:
    """Return the distinct plan hashes of runs; plain SGD has none."""
    return list(dict.fromkeys(plan["hash"] for run in runs for plan in run["plans"]))
