"""`ownerwise demo`: compare private training methods on bundled data, in minutes."""

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
        help="compare DP-SGD, IDP-SGD, INO-SGD and a calibrated model on bundled data, in minutes",
        description="Compare four methods with ten owners, one per digit, with budgets from strict "
        "to lax. All methods are tuned over the same search space, on several splits of the data. "
        "The command prints tables and writes a report. It then trains one model with secret "
        "randomness and writes its run folder. Nothing is downloaded.",
    )
    command.set_defaults(command=_run)
    command.add_argument(
        "--out",
        type=Path,
        default=Path("demo-report.html"),
        help="file to write the report to [demo-report.html]",
    )
    command.add_argument(
        "--folder",
        type=Path,
        default=Path("demo-run"),
        help="run folder of the private model; a number is appended if it exists [demo-run]",
    )
    command.add_argument(
        "--quick", action="store_true", help="use two splits, one seed and no search"
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.cli import demo_comparison
    from ownerwise.cli.demo_private import train_privately, unused_folder
    from ownerwise.cli.train import summary
    from ownerwise.report import plotly_script, write_report
    from ownerwise.report.comparison import Comparison
    from ownerwise.report.overview import findings
    from ownerwise.report.verdicts import chance
    from ownerwise.runs import CARD, REPORT
    from ownerwise.wording import duration

    plotly_script()  # fails before training, not after it, if plotly is missing
    search = demo_comparison.DemoSearch()
    if options.quick:
        search = demo_comparison.DemoSearch(
            (1.0,), (4.0,), (101,), (1,), splits=2, steps=20, evaluations=4
        )
    demo = demo_comparison.Demo(search)
    start = time.monotonic()
    train, validation, test = demo.splits[0]
    budgets = demo.assignment.group_budgets
    print(
        f"{len(train)} images of digits, one owner per digit. Budgets per record: epsilon "
        f"{min(budgets.values()):g} (digit 0) to {max(budgets.values()):g}, delta 1e-5.\n"
        f"{_count(search.splits, 'random split')} of the data. On each, every method tries "
        f"{_count(len(search.cells), 'pair')} of clip norm and learning rate on {len(validation)} "
        f"validation images. The best pair is then run with {_count(len(search.seeds), 'seed')} "
        f"and evaluated on {len(test)} test images."
    )
    compared = demo.compare(progress=sys.stderr.isatty())
    runs = [run for of_method in compared.values() for run in of_method]
    comparison = Comparison.of(runs)
    write_report(runs, options.out, title="The digits: ten owners with ten budgets")
    print("\nRecall on test images in percent, mean ± standard deviation over runs:")
    print("\n".join(demo_comparison.table(comparison)))
    print("\nRecall of each owner's digit:")
    print("\n".join(demo_comparison.owner_table(comparison, budgets)))
    print()
    if options.quick:
        print("This is only a quick trial: nothing was tuned, so do not draw conclusions from it.")
    else:
        for pair, words in findings(comparison).items():
            print(f"{pair}. {words}")
        print(chance(comparison))
        print("Clip norm and learning rate chosen on each split:")
        print("\n".join(demo_comparison.chosen_cells(comparison)))
    print(
        "This comparison is a repeatable study on public data, NOT private: its seeds are fixed. "
        "The epsilon values are what the same runs would spend with secret randomness."
    )
    print("\nNow one private model: every image belongs to its own person, randomness is secret.")
    run = train_privately(demo, unused_folder(options.folder))
    print("\n".join(summary(run)))
    assert run.folder is not None
    print(
        f"\nDone in {duration(time.monotonic() - start)}. Open in a browser:\n"
        f"  {run.folder / REPORT}: the private model; its privacy card is {run.folder / CARD}\n"
        f"  {options.out}: the comparison of the four methods\n"
        "Next, with your own table, one row per record:\n"
        "  ownerwise init mine.csv     write a commented configuration, and fill in its TODOs\n"
        "  ownerwise train mine.toml   train, and write the run folder, its report and its card\n"
        "The whole way, with two hospital tables: docs/how-to/hospital.md"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
