"""`ownerwise report`: write an HTML report on one or more runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ownerwise.cli.train import figures
from ownerwise.errors import IS_A_FOLDER, OwnerwiseError


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "report",
        help="write an HTML report on one or more runs",
        description="Write an HTML report on one or more runs. Runs with the same label are "
        "treated as seeds of one method.",
    )
    command.set_defaults(command=_run)
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    command.add_argument(
        "--out", type=Path, default=Path("report.html"), help="file to write [report.html]"
    )
    command.add_argument("--title", help="heading of the report")
    command.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings and errors only"
    )
    command.add_argument(
        "--json", action="store_true", help="print the results of each run as JSON as well"
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.report import write_report
    from ownerwise.runs import Run

    problems: list[str] = []
    runs = []
    for folder in options.runs:
        try:
            runs.append(Run.load(folder))
        except OwnerwiseError as error:
            problems += error.problems
    if options.out.is_dir():
        problems.append(IS_A_FOLDER.format(options.out))
    if problems:
        raise OwnerwiseError(problems)
    write_report(runs, options.out, title=options.title)
    if options.json:
        print(json.dumps({"report": str(options.out), "runs": list(map(figures, runs))}, indent=2))
    elif not options.quiet:
        print(f"Written to {options.out}.")
