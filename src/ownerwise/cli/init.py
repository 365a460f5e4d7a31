"""`ownerwise init`: write a commented configuration for a table, from the names of its columns."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "init",
        help="write a configuration to start from, for a table of your own",
        description="Write a commented configuration for a CSV or Parquet file. Only the names of "
        "its columns are read, never a row: what only the data or you can tell is left as TODO, "
        "and `ownerwise train` lists all of it.",
    )
    command.set_defaults(command=_run)
    command.add_argument("data", type=Path, help="CSV file whose first line names the columns")
    command.add_argument("--target", metavar="COLUMN", help="column with the class of each record")
    command.add_argument("--owner", metavar="COLUMN", help="column with the owner of each record")
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write [the table's name, with .toml]"
    )


def _run(options: argparse.Namespace) -> None:
    output = options.output or options.data.with_suffix(".toml")
    if output.exists():
        raise OwnerwiseError(f"{output} already exists; choose another file with --output")
    from ownerwise.config.starting import starting_config
    from ownerwise.files import write_text

    write_text(output, starting_config(options.data, output, options.target, options.owner))
    print(f"Written to {output}. Only the names of the columns were read. Replace every TODO, then")
    print(f"run `ownerwise train {output}`, which lists what is still missing.")
