"""`ownerwise tune`: choose settings privately, within the budgets, and write the best run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ownerwise.cli.configuration import add_run_options, read
from ownerwise.cli.plan import warn_of_useless
from ownerwise.cli.train import figures, summary, write_pages
from ownerwise.errors import printable


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "tune",
        help="choose settings privately, within the budgets",
        description="Train a secret, random number of times with candidate settings from the "
        "section [tuning] of a TOML file, and write the run folder of the best one. The epsilons "
        "are those of the whole search. Ctrl-C stops the search; it then counts as spent.",
    )
    command.set_defaults(command=_run)
    add_run_options(command)
    command.add_argument("--json", action="store_true", help="print the results as JSON")


def _run(options: argparse.Namespace) -> None:
    from ownerwise.config import prepare_tuning
    from ownerwise.report import tuning_line
    from ownerwise.tuning import search

    config = read(options.config, options.changes)
    prepared = prepare_tuning(config, folder=options.folder, data_dir=options.data_dir)
    plan, silent = prepared.plans[0], options.quiet or options.json
    if silent:
        warn_of_useless(plan)
    else:
        print(plan.describe())
        print(
            f"Searching among {len(prepared.candidates)} candidates; how many runs are made, and "
            "which, stays secret. Ctrl-C stops the search, which then counts as spent."
        )
    run = search(prepared)
    written = write_pages(run)
    if options.json:
        print(json.dumps({**figures(run), "tuning": tuning_line(run)}, indent=2))
    if silent:
        return
    print()
    print(printable(tuning_line(run)))
    for line in summary(run):
        print(line)
    print(f"Written to {run.folder}: {', '.join(written)}")
