"""`ownerwise demo`: what budgets do to their owners, on embedded data, in minutes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "demo",
        help="compare DP-SGD, IDP-SGD and INO-SGD on embedded data, in minutes",
        description="Ten owners, one per digit, with budgets from strict to lax. Tunes four "
        "methods over the same search, compares them over several seeds, prints a table and "
        "writes a report. Nothing is downloaded.",
    )
    command.set_defaults(command=_run)
    command.add_argument(
        "--out", type=Path, default=Path("demo-report.html"), help="report [demo-report.html]"
    )
    command.add_argument("--quick", action="store_true", help="two seeds and a tiny search")


def _run(options: argparse.Namespace) -> None:
    from ownerwise.cli import demonstration as demo
    from ownerwise.report import plotly, write_report

    plotly()  # asked for before the work, not after it
    search = demo.Search()
    if options.quick:
        search = demo.Search((1.0,), (4.0,), (101,), (1, 2), steps=20, evaluations=4)
    shown = demo.Demo(search)
    start = time.monotonic()
    train, validation, test = shown.parts
    budgets = shown.assignment.group_budgets
    print(
        f"{len(train)} images of digits, one owner per digit, epsilon {min(budgets.values()):g} "
        f"(digit {shown.strictest}) to {max(budgets.values()):g} per record, delta 1e-5.\n"
        f"Each method: {len(search.cells)} pairs of clip norm and learning rate x "
        f"{len(search.search_seeds)} seeds on {len(validation)} validation images, then the best "
        f"one x {len(search.seeds)} seeds on {len(test)} test images."
    )
    compared = shown.compare(progress=sys.stderr.isatty())
    summaries = shown.summaries(compared)
    runs = [run for found in compared.values() for run in found]
    write_report(runs, options.out, title="Ten owners, ten budgets: the digits")
    print("\nRecall on test images, mean ± standard deviation over seeds:")
    print("\n".join(demo.table(summaries)))
    print("\nRecall of each owner's digit:")
    print("\n".join(demo.owner_table(summaries, budgets)))
    print()
    if options.quick:
        print("A trial of the machinery: nothing was tuned, so nothing follows from the numbers.")
    else:
        print("\n".join(demo.reading(summaries)))
        chosen = ", ".join(f"{s.label}: clip norm {s.clip_norm:g}, lr {s.lr:g}" for s in summaries)
        print(f"Chosen by validation accuracy: {chosen}.")
    print(
        "Fixed seeds, so that it can be repeated: NOT private. The digits are public; epsilon is "
        "what the same run with secret randomness would spend."
    )
    print(f"Report: {options.out} ({time.monotonic() - start:.0f} s)")
