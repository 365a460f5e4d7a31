"""`ownerwise train`: train from a configuration; write a run folder with a report and a card."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ownerwise.cli.configuration import add_run_options, read
from ownerwise.cli.plan import warn_of_useless
from ownerwise.errors import OwnerwiseError, printable

if TYPE_CHECKING:
    import numpy as np

    from ownerwise.config.reading import Config
    from ownerwise.processes import Processes
    from ownerwise.runs import Run


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "train",
        help="train a model from a configuration file",
        description="Train a model from a TOML file and write a run folder: history, checkpoint, "
        "report and privacy card. Ctrl-C takes effect between steps; --resume continues the run.",
    )
    command.set_defaults(command=_run)
    add_run_options(command)
    command.add_argument("--resume", action="store_true", help="resume the run in the run folder")
    command.add_argument("--device", help="where to train, such as cuda [the one in the file]")
    command.add_argument(
        "--json",
        action="store_true",
        help="print the results as JSON: the folder, the last history line and the epsilons spent",
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.processes import joined

    changes = list(options.changes)
    if options.device is not None:
        changes.append(f"training.device={json.dumps(options.device)}")
    config = read(options.config, changes)
    if config["tuning"]:
        raise OwnerwiseError(
            "the configuration has a section [tuning]: run `ownerwise tune`, or remove the section "
            "to train with the settings of the other sections"
        )
    with joined(config["training"].get("device")) as processes:
        _train(config, options, processes)


def _train(config: Config, options: argparse.Namespace, processes: Processes) -> None:
    """Train; the first of the processes that torchrun has started prints and writes for all."""
    from ownerwise.config import prepare_run
    from ownerwise.runs import holds_a_run

    silent = options.quiet or options.json or not processes.first
    prepared = processes.together(
        lambda: prepare_run(
            config,
            folder=options.folder,
            data_dir=options.data_dir,
            resume=options.resume,
            progress=False if silent else None,
        )
    )
    if options.resume and processes.first and not holds_a_run(prepared.folder):
        print(f"ownerwise: no run in {prepared.folder}: starting a new one", file=sys.stderr)
    if silent:
        warn_of_useless(prepared.plan)
    else:
        print(printable(prepared.data))
        print(prepared.plan.describe())
    for concern in prepared.statistics_concerns:
        print(f"ownerwise: warning: statistics of no use: {concern}", file=sys.stderr)
    run = prepared.fit(resume=options.resume)
    if not processes.first:
        return
    written = write_pages(run)
    if options.json:
        print(json.dumps(figures(run), indent=2))
    if silent:
        return
    print()
    for line in summary(run):
        print(line)
    print(f"Written to {run.folder}: {', '.join(written)}")


def figures(run: Run) -> dict[str, Any]:
    """Return the results of a run as JSON types; infinite and unknown epsilons become None."""
    return {
        "folder": str(run.folder),
        "private": run.private,
        "not_private": run.not_private,
        "steps_spent": run.steps_spent,
        "steps_planned": run.plan.steps,
        "unit": run.plan.unit,
        "classes": None if run.classes is None else list(run.classes),
        "epsilon_spent": _extremes(run.epsilon()),
        "epsilon_promised": _extremes(run.plan.targets),
        "owner_epsilon": _extremes(run.owner_epsilon()),
        "last": run.history[-1] if run.history else None,
    }


def _extremes(values: np.ndarray) -> dict[str, float | None]:
    ends = {"smallest": float(values.min()), "largest": float(values.max())}
    return {name: end if math.isfinite(end) else None for name, end in ends.items()}


def _accuracy(metrics: Mapping[str, Any], classes: Sequence[str] | None) -> str:
    words, worst = f"accuracy {metrics['accuracy']:.4f}", metrics["worst_group"]
    majority = metrics.get("classification", {}).get("majority")
    if majority is not None:
        name = majority["class"] if classes is None else classes[int(majority["class"])]
        words += f" (always {printable(name)!r}: {majority['share']:.4f})"
    if "owner_accuracy" in metrics:
        words += f", {metrics['owner_accuracy']:.4f} per owner"
    if worst is not None:
        words += f", worst group {printable(worst['name'])} {worst['recall']:.4f}"
    return words


def _regression(metrics: Mapping[str, Any]) -> str:
    r2 = "" if metrics["r2"] is None else f", R2 {metrics['r2']:.3f}"
    words, worst = (
        f"RMSE {metrics['rmse']:.4g}, MAE {metrics['mae']:.4g}{r2}",
        metrics["worst_group"],
    )
    words += f" (RMSE of the mean alone {metrics['trivial_rmse']:.4g})"
    if worst is not None:
        words += f", worst group {printable(worst['name'])} RMSE {worst['rmse']:.4g}"
    return words


def write_pages(run: Run) -> list[str]:
    """Write the report and the card to the run folder and return the names of its main files."""
    from ownerwise.runs import CARD, HISTORY, REPORT

    assert run.folder is not None
    run.card(run.folder / CARD)
    try:
        run.report(run.folder / REPORT)
    except OwnerwiseError as error:
        print(f"ownerwise: no report was written: {error}", file=sys.stderr)
        return [CARD, HISTORY]
    return [REPORT, CARD, HISTORY]


def summary(run: Run) -> list[str]:
    """Return lines with the results of the last evaluation and the epsilon spent."""
    from ownerwise.owners import UNITS
    from ownerwise.planning import owner_statement
    from ownerwise.report import unprotected_owners
    from ownerwise.wording import span, span_up

    lines = []
    last = run.history[-1]
    for part in ("validation", "test"):
        metrics = last.get(part)
        if metrics is not None:
            words = _regression(metrics) if "rmse" in metrics else _accuracy(metrics, run.classes)
            lines.append(f"{part} {words} (no guarantee covers {part} records)")
    spent, targets = run.epsilon(), run.plan.targets
    words = (
        f"epsilon spent per {run.plan.unit} {span_up(spent.min(), spent.max())}, budgets "
        f"{span(targets.min(), targets.max(), 4)}; "
    )
    most = int(run.plan.records.max())
    if run.plan.unit == "owner":
        words += f"unit of privacy: {UNITS['owner']}"
    elif most > 1:
        words += f"unit of privacy: {UNITS['record']} (up to {most} records each). "
        words += owner_statement(run.owner_epsilon())
    else:
        words += "unit of privacy: one record, which is all that its owner has"
    lines.append(words)
    lines += unprotected_owners(run)
    if not run.private:
        lines.append(printable(f"NOT PRIVATE: {'; '.join(run.not_private)}"))
    return lines
