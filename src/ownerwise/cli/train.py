"""`ownerwise train`: a configuration becomes a run folder with report and privacy card."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ownerwise.config import (
    assemble,
    read_config,
)
from ownerwise.errors import OwnerwiseError
from ownerwise.owners import (
    UNIT,
)
from ownerwise.runs import (
    CARD,
    REPORT,
    Run,
    holds_a_run,
)
from ownerwise.wording import span, span_up


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "train",
        help="train a model as a configuration file says",
        description="Train a model as a TOML file says, into a run folder: history, checkpoint, "
        "report and privacy card. Ctrl-C stops between two steps; --resume goes on.",
    )
    command.set_defaults(command=_run)
    command.add_argument("config", type=Path, help="TOML file")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="SECTION.KEY=VALUE",
        help="change a value of the file; may be repeated",
    )
    command.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    command.add_argument("--folder", type=Path, help="run folder [that of the file, or runs/NAME]")
    command.add_argument("--data-dir", type=Path, help="where data sets lie")


def _run(options: argparse.Namespace) -> None:
    config = read_config(options.config, options.changes)
    assembly = assemble(
        config, folder=options.folder, data_dir=options.data_dir, resume=options.resume
    )
    if options.resume and not holds_a_run(assembly.folder):
        print(f"ownerwise: no run in {assembly.folder}: a new one begins", file=sys.stderr)
    print(assembly.data)
    print(assembly.plan.describe())
    run = assembly.fit(resume=options.resume)
    written = _write(run)
    print()
    for line in summary(run):
        print(line)
    print(f"Written to {run.folder}: {', '.join(written)}")


def _write(run: Run) -> list[str]:
    """Write report and card into the run folder and return what lies there."""
    assert run.folder is not None
    run.card(run.folder / CARD)
    try:
        run.report(run.folder / REPORT)
    except OwnerwiseError as error:
        print(f"ownerwise: no report was written: {error}", file=sys.stderr)
        return [CARD, "history.jsonl"]
    return [REPORT, CARD, "history.jsonl"]


def summary(run: Run) -> list[str]:
    """Return the last evaluation and what was spent, in words."""
    lines = []
    last = run.history[-1]
    for part in ("validation", "test"):
        found = last.get(part)
        if found is not None:
            worst = found["worst_group"]
            lines.append(
                f"{part} accuracy {found['accuracy']:.4f}, worst group {worst['name']} "
                f"{worst['recall']:.4f} (no guarantee covers {part} records)"
            )
    spent, targets = run.epsilon(), run.plan.targets
    lines.append(
        f"epsilon spent {span_up(spent.min(), spent.max())}, budgets "
        f"{span(targets.min(), targets.max(), 4)}; unit of privacy: {UNIT}"
    )
    if not run.private:
        lines.append(f"NOT PRIVATE: {'; '.join(run.not_private)}")
    return lines
