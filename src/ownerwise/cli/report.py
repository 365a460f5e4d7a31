"""`ownerwise report`: write an HTML report on one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    print(f"Written to {options.out}.")
