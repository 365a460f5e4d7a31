"""The command line: `ownerwise plan budgets.csv ...`, `ownerwise train config.toml`, ..."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from ownerwise import __version__
from ownerwise.cli import demo, plan, report, train
from ownerwise.errors import OwnerwiseError, PrivacyWarning

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_COMMANDS = (demo, plan, train, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrivacyWarning)
        warnings.showwarning = _show_warning
        try:
            command(options)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has seen enough, such as `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OwnerwiseError as error:
            return _complain(error.problems)
        except OSError as error:
            return _complain([str(error)])
        except KeyboardInterrupt as error:
            print(f"ownerwise: {str(error) or 'stopped'}", file=sys.stderr)
            return EXIT_INTERRUPTED
    return 0


def _complain(problems: Sequence[str]) -> int:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"ownerwise: {count}", file=sys.stderr)
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"ownerwise: warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ownerwise",
        description="Private training where every data owner sets an own privacy budget.",
    )
    parser.add_argument("--version", action="version", version=f"ownerwise {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    installed = (point.load() for point in entry_points(group="ownerwise.commands"))
    for command in (*_COMMANDS, *installed):
        command.add(commands)
    return parser
