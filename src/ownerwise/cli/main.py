"""The command line: `ownerwise plan budgets.csv ...`, `ownerwise train config.toml`, ..."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ownerwise import __version__
from ownerwise.cli import audit, demo, export, init, plan, predict, report, train, tune
from ownerwise.errors import OwnerwiseError, PrivacyWarning, printable, require

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_SHELLS = ("bash", "zsh", "tcsh")
_COMMANDS = (demo, init, plan, train, tune, predict, report, audit, export)
_INSTALLED_COMMANDS = "ownerwise.commands"
"""Entry points in this group add commands: each names a module that defines `add(commands)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings(), _stopped_by_sigterm():
        warnings.simplefilter("always", PrivacyWarning)
        warnings.showwarning = _show_warning
        try:
            options = make_parser(arguments[0] if arguments else "").parse_args(arguments)
            command: Callable[[argparse.Namespace], None] = options.command
            command(options)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has stopped
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OwnerwiseError as error:
            return _complain([] if error.everywhere and not _speaks() else error.problems)
        except OSError as error:
            return _complain([str(error)])
        except KeyboardInterrupt as error:
            print(f"ownerwise: {str(error) or 'stopped'}", file=sys.stderr)
            return EXIT_INTERRUPTED
    return 0


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, which schedulers send to stop a process, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser for the command line.

    A command from another package is loaded only if it is `command`, the command being called.
    If `command` is None, all such commands are loaded.
    """
    parser = argparse.ArgumentParser(
        prog="ownerwise",
        description="Private training in which each data owner sets their own privacy budget.",
    )
    parser.add_argument("--version", action="version", version=f"ownerwise {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        metavar="SHELL",
        help=f"print a completion script for {', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for own in _COMMANDS:
        own.add(commands)
    for point in entry_points(group=_INSTALLED_COMMANDS):
        if command in (None, point.name):
            point.load().add(commands)
        else:
            commands.add_parser(point.name, help=_summary(point))
    return parser


class _PrintCompletion(argparse.Action):
    """Print a shell's completion script for all commands, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        shtab = require("shtab", "ownerwise[completion]", "shell completion")
        every = make_parser()
        _complete_paths(every, shtab.FILE)
        print(shtab.complete(every, shell=values))
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, files: Any) -> None:
    """Make path arguments complete to file names in all commands."""
    for action in parser._actions:
        if action.type is Path:
            vars(action)["complete"] = files
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files)


def _summary(point: EntryPoint) -> str:
    """Return the summary of the package that provides a command."""
    summary = None if point.dist is None else point.dist.metadata["Summary"]
    return (summary or "").replace("%", "%%")


def _speaks() -> bool:
    """Return whether this process prints, if torchrun has started several."""
    if "RANK" not in os.environ:
        return True
    from ownerwise.processes import speaks

    return speaks()


def _complain(problems: Sequence[str]) -> int:
    if not problems:
        return EXIT_BAD_INPUT
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"ownerwise: {count}", file=sys.stderr)
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {printable(problem)}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    if _speaks():
        print(f"ownerwise: warning: {printable(message)}", file=sys.stderr)
