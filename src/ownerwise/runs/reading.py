"""The files in a run folder: their names, their required contents, and whether they agree.

The account records what a run has spent. The settings, the checkpoint and the history identify the
run to which they belong. If the checkpoint or the history contains a later step than the account,
the account is an old copy, and the folder is rejected. The history and environment files do not
affect what the account records: if one is corrupted, its readable part is used and the corruption
is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.files import (
    ANYTHING,
    INTEGER,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    fields,
    list_of,
    mapping_of,
    or_null,
    parse_json,
    read_json,
)
from ownerwise.step import Balance, checkpoints

CONFIG = "config.json"
PLAN = "plan.json"
HISTORY = "history.jsonl"
ENVIRONMENT = "environment.json"
FORMAT_KEY = "run_format"  # in config.json; missing in format 1 (version 0.1.0)
RUN_KEY = "run_id"  # the run's identity, in config.json and in every line of history
NO_RUN = "every run folder contains this file; check the path"

_PLUG = or_null(fields({"kind": TEXT}))
_CONFIG = fields(
    {
        "name": TEXT,
        "label": TEXT,
        "seed": or_null(INTEGER),
        "optimizer": fields({"name": TEXT, "lr": NUMBER}),
        "weights": _PLUG,
        "clipping": _PLUG,
        "evaluate_every": WHOLE,
        "checkpoint_every": WHOLE,
        "groups_are": TEXT,
        "group_budgets": mapping_of(POSITIVE),
    },
    {
        FORMAT_KEY: WHOLE,
        RUN_KEY: TEXT,
        "not_private": list_of(TEXT),
        "constraints": mapping_of(ANYTHING),
        "averaging": NUMBER,
        "held_out_owners": fields({"unprotected": WHOLE, "in_plan": WHOLE}),
        "repair": fields({"shift": list_of(NUMBER)}),
        "prediction": fields(
            {"classes": list_of(TEXT), "sizes": mapping_of(WHOLE), "columns": list_of(TEXT)},
            {"numbers": WHOLE},
        ),
    },
)
_PER_OWNER = {"owners": WHOLE, "owner_accuracy": NUMBER}
_GROUP = fields({"loss": or_null(NUMBER), "recall": NUMBER, "records": WHOLE}, _PER_OWNER)
_METRICS = fields(
    {
        "loss": or_null(NUMBER),
        "accuracy": NUMBER,
        "balanced_accuracy": NUMBER,
        "worst_group": or_null(fields({"name": TEXT, "recall": NUMBER})),
        "spread": or_null(NUMBER),
        "groups": mapping_of(_GROUP),
    },
    _PER_OWNER,
)
_LINE = fields(
    {
        "step": WHOLE,
        "updates": WHOLE,
        "seconds": NUMBER,
        "learning_rate": NUMBER,
        "validation": or_null(_METRICS),
    },
    {
        "test": or_null(_METRICS),
        "constraints": or_null(mapping_of(ANYTHING)),
        "calibration": mapping_of(ANYTHING),
        "statistics": mapping_of(ANYTHING),
        RUN_KEY: TEXT,
    },
)
_VERSIONS = dict.fromkeys(("python", "ownerwise", "torch", "numpy", "platform"), TEXT)
_VERSIONS |= {"dp-accounting": TEXT, "threads": WHOLE}
_ENVIRONMENT = fields(_VERSIONS, {"earlier": list_of(fields(_VERSIONS))})


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the settings in a run folder and the run's identity ("" in format 1)."""
    path = folder / CONFIG
    missing = f"no {CONFIG} in {folder}: {NO_RUN}"
    version = read_json(path, fields({}, {FORMAT_KEY: WHOLE}), missing).get(FORMAT_KEY, 1)
    checkpoints.check_format(path, version)
    config = read_json(path, _CONFIG, missing)
    config.pop(FORMAT_KEY, None)
    identity = config.pop(RUN_KEY, "")
    if version > 1 and not identity:
        raise OwnerwiseError(f"{path} is corrupted: {RUN_KEY} is missing")
    return config, identity


def read_environment(folder: Path, problems: Problems) -> dict[str, Any]:
    """Return the versions a run used; if they are unreadable, return {} and extend `problems`."""
    missing = f"no {ENVIRONMENT} in {folder}: {NO_RUN}"
    with problems.guard():
        return read_json(folder / ENVIRONMENT, _ENVIRONMENT, missing)
    return {}


def read_history(path: Path, identity: str, problems: Problems) -> list[dict[str, Any]]:
    """Return the readable lines of a run's history, without a partial last line.

    Corrupted lines and lines from other runs are skipped; `problems` then says how many there were.
    """
    try:
        # the last line break is followed by nothing, or by a partial line
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.add(f"{path} cannot be read: {error.strerror}")
        return []
    kept, damaged, foreign = [], 0, 0
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line, _LINE, f"line {number}")
        except OwnerwiseError:
            damaged += 1
            continue
        if entry.pop(RUN_KEY, identity) == identity:  # format 1 has no run id
            kept.append(entry)
        else:
            foreign += 1
    if damaged:
        problems.add(f"{path} is corrupted: {damaged} of {len(lines)} lines cannot be read")
    if foreign:
        problems.add(f"{path}: {foreign} of {len(lines)} lines belong to another run")
    return kept


def disagreements(
    folder: Path,
    plan_hash: str,
    balance: Balance | None,
    header: dict[str, Any] | None,
    config: dict[str, Any],
    identity: str,
    history: Sequence[dict[str, Any]],
) -> list[str]:
    """Return a message for each contradiction between the files in a run folder.

    Args:
        folder: the run folder.
        plan_hash: hash of the plan in the folder.
        balance: state of the account.
        header: header of the newest checkpoint, or None before the first checkpoint.
        config, identity: settings and identity in `config.json`.
        history: the lines of the history.
    """
    if balance is None:
        return [
            f"the account of {folder} is missing, so the number of spent steps is unknown. Restore "
            "the newest backup of the whole folder"
        ]
    problems = []
    if identity and balance.run != identity:
        problems.append(
            f"{CONFIG} belongs to run {identity[:12]}, but the account belongs to "
            f"{f'run {balance.run[:12]}' if balance.run else 'a run from version 0.1.0'}: one of "
            "them is from another folder"
        )
    if balance.plan != plan_hash:
        problems.append(
            f"the account belongs to plan {balance.plan[:12]}, but {PLAN} is plan "
            f"{plan_hash[:12]}: one of them is from another run"
        )
    if header is not None:
        problems += checkpoints.account_problems(balance, header, "the checkpoint")
        if header["seed"] != config["seed"]:
            problems.append(
                f"{CONFIG} has seed {config['seed']}, but the checkpoint has {header['seed']}: one "
                "of them was changed"
            )
    last = max((max(line["step"], line["updates"]) for line in history), default=0)
    if last > balance.spent:
        problems.append(
            f"the account counts {balance.spent} steps, but {HISTORY} has a line for step {last}: "
            "an old copy of the account was restored. Restore the newest account"
        )
    return problems
