"""The configuration file on the command line, which several commands read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ownerwise.config.reading import Config


def add_changes(command: argparse.ArgumentParser, where: str = "file") -> None:
    """Add the options that change a configuration, or where its data is."""
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="SECTION.KEY=VALUE",
        help=f"change a value in the {where}; may be repeated",
    )
    command.add_argument("--data-dir", type=Path, help="folder that contains the data sets")


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that makes a run from a configuration."""
    command.add_argument("config", type=Path, help="TOML file")
    add_changes(command)
    command.add_argument(
        "--folder", type=Path, help="run folder [the one in the file, or runs/NAME]"
    )
    command.add_argument(
        "-q", "--quiet", action="store_true", help="print warnings and errors only"
    )


def read(path: Path, changes: Sequence[str]) -> Config:
    """Return the configuration in a file; names such as nets:Net are found beside the file."""
    from ownerwise.config import read_config

    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    return read_config(path, changes)
