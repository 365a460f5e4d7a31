"""How results were made: the command that makes them again, seeds, times, and plans."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ownerwise.experiments.summary import Result, Study

PROGRAM = "ownerwise experiments"


def command(
    action: str,
    setting: str,
    specs: Sequence[str],
    seeds: Sequence[int],
    profile: str = "paper",
    changes: Sequence[str] = (),
    options: Sequence[str] = (),
) -> str:
    """Return what to type for methods in a setting.

    Args:
        action: "run" or "tune".
        setting: its name.
        specs: methods with their arguments.
        seeds: of the runs; they follow one another.
        profile: "paper" or "short".
        changes: "section.key=value" each.
        options: further words.
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


def commands(study: Study) -> list[str]:
    """Return the commands of a study: methods with the same seeds go together."""
    together: dict[tuple[int, ...], list[str]] = {}
    for runs in study.methods.values():
        together.setdefault(tuple(run["seed"] for run in runs), []).append(runs[0]["spec"])
    first = study.first
    return [
        command("run", first["setting"], specs, seeds, first["profile"], first["changes"])
        for seeds, specs in together.items()
    ]


def origin(runs: Sequence[Result]) -> dict[str, Any]:
    """Return seeds, times by run and plans of a method, as JSON types.

    Training time is over all parts of a run that was stopped; wall time is that of its last part.
    """
    return {
        "seeds": [run["seed"] for run in runs],
        "train_seconds": [run["train_seconds"] for run in runs],
        "wall_seconds": [run["wall_seconds"] for run in runs],
        "plans": plan_hashes(runs),
    }


def plan_hashes(runs: Sequence[Result]) -> list[str]:
    """Return the plans behind runs, each once; none for plain SGD."""
    return list(dict.fromkeys(plan["hash"] for run in runs for plan in run["plans"]))
