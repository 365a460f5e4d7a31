"""`ownerwise predict`: predict classes or numbers of new records with the model of a run."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ownerwise.errors import OwnerwiseError, Problems, printable

if TYPE_CHECKING:
    import numpy as np

    from ownerwise.repair import PullAdjustment
    from ownerwise.runs import Run


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "predict",
        help="predict new records with a trained model",
        description="Predict the class, or the number, of every row of a table with the model of a "
        "run of `ownerwise train`, preprocessed as in training. Writes CSV: the kept columns, the "
        "prediction and, for classes, the probability of each.",
    )
    command.set_defaults(command=_run)
    command.add_argument("run", type=Path, metavar="RUN", help="run folder")
    command.add_argument("data", type=Path, help="table with the run's input columns")
    command.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy a column of the table, such as an id, to the output; may be repeated",
    )
    command.add_argument(
        "--repair",
        type=Path,
        metavar="COUNTS",
        help="CSV file of published label counts, per owner or per epsilon: take the tilt of the "
        "budgets out of the predictions",
    )
    command.add_argument("--tau", type=float, help="strength of --repair [1.0]")
    command.add_argument(
        "--aim", help="class shares that --repair aims at: natural or balanced [natural]"
    )
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="CSV file to write [standard output]"
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.config import read_inputs
    from ownerwise.files import write_text
    from ownerwise.runs import Run

    problems = Problems()
    run = repair = read = None
    with problems.guard():
        run = Run.load(options.run)
    if run is not None:
        with problems.guard():
            repair = _repair(options, run)
        with problems.guard():
            read = read_inputs(run.config, options.data, options.keep)
    if options.output is not None and options.output.is_dir():
        problems.add(f"--output {options.output} is a folder; expected a file name")
    problems.raise_()
    assert run is not None
    assert read is not None
    for line in _remarks(run):
        print(f"ownerwise: {printable(line)}", file=sys.stderr)
    text = _table(run, read.columns, read.inputs, repair)
    if options.output is None:
        print(text, end="")
    else:
        write_text(options.output, text)
        print(f"Written to {options.output}.")


def _repair(options: argparse.Namespace, run: Run) -> PullAdjustment | None:
    from ownerwise.repair import as_repair

    given = {"tau": options.tau, "aim": options.aim}
    given = {key: value for key, value in given.items() if value is not None}
    if options.repair is None:
        if given:
            raise OwnerwiseError(f"--{next(iter(given))} needs --repair COUNTS")
        return None
    if run.regression is not None:
        raise OwnerwiseError("--repair applies to classes, but this run predicts a number")
    return as_repair({**given, "counts": str(options.repair)}, run.plan, run.classes or ())


def _remarks(run: Run) -> list[str]:
    """Return cautions about the model for users of its predictions."""
    remarks = []
    if not run.private:
        remarks.append(f"the model is NOT PRIVATE: {'; '.join(run.not_private)}")
    if run.steps_spent < run.plan.steps:
        remarks.append(
            f"the run has taken {run.steps_spent} of {run.plan.steps} steps: the predictions are "
            "those of its newest checkpoint"
        )
    return remarks


def _table(run: Run, columns: Any, inputs: np.ndarray, repair: PullAdjustment | None) -> str:
    """Return the predictions as CSV: numbers, or classes with their probabilities."""
    if run.regression is not None:
        names, rows = ["predicted"], [[f"{value:.6g}"] for value in run.predict(inputs)]
    else:
        assert run.classes is not None
        names = ["predicted", *(f"probability_{name}" for name in run.classes)]
        rows = [
            [run.classes[int(row.argmax())], *(f"{value:.6g}" for value in row)]
            for row in run.predict_proba(inputs, repair)
        ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *names])
    kept = zip(*columns.values(), strict=True) if columns else [()] * len(rows)
    writer.writerows([*cells, *row] for cells, row in zip(kept, rows, strict=True))
    return text.getvalue()
