"""`ownerwise plan`: turn a table of budgets into a plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ownerwise.errors import IS_A_FOLDER, PlanError, Problems

if TYPE_CHECKING:
    from ownerwise.owners import Owners
    from ownerwise.planning import PlanRequest

ASSUMED = "assumed one each"
NO_RECORDS = "{} has no records column, so one record per owner is assumed; add the column"


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "plan",
        help="turn a table of budgets into sampling rates, clip norms and noise",
        description="Turn a table of budgets (CSV or Parquet with the columns owner, epsilon and, "
        "optionally, delta and records) into a verified plan. Specify two of --steps, --batch-size "
        "and --noise-multiplier; the third follows from the budgets.",
    )
    command.set_defaults(command=_run)
    command.add_argument("budgets", type=Path, help="CSV or Parquet file, one row per owner")
    command.add_argument(
        "--method", default="sample", help="uniform, sample, scale or both [sample]"
    )
    command.add_argument("--steps", type=int, help="number of steps")
    command.add_argument("--batch-size", type=float, help="expected number of records per step")
    command.add_argument(
        "--noise-multiplier", type=float, help="noise standard deviation divided by the clip norm"
    )
    command.add_argument(
        "--clip-norm", type=float, default=1.0, help="bound on a record's gradient norm [1.0]"
    )
    command.add_argument(
        "--mixture", type=float, help="for --method both: from 0 (sample) to 1 (scale) [0.5]"
    )
    command.add_argument("--accountant", default="pld", help="pld or rdp [pld]")
    command.add_argument(
        "--delta", type=number, help="delta for owners whose row in the table has none [1e-5]"
    )
    command.add_argument(
        "--level",
        action="append",
        default=[],
        metavar="NAME=EPSILON",
        help="epsilon for a named budget level; may be repeated",
    )
    command.add_argument(
        "--calibrate",
        dest="calibration",
        action="store_true",
        help="pay for a release after training that removes the tilt of the class biases",
    )
    command.add_argument(
        "--calibrate-pull",
        dest="calibration",
        action="store_const",
        const={"pull": True},
        help="the same, with one more sum that measures the direction of the tilt: better if "
        "owners hold different classes",
    )
    command.add_argument(
        "--statistics",
        type=number,
        metavar="SHARE",
        help="pay this fraction of the strictest budget, such as 0.05, for means and standard "
        "deviations of the columns, released before training",
    )
    command.add_argument(
        "--strict", action="store_true", help="refuse plans that cannot use up every budget"
    )
    command.add_argument(
        "--hardened",
        action="store_true",
        help="protect against attacks that exploit rounding: pad every batch to a fixed number of "
        "rows and place the records in secret, random rows",
    )
    command.add_argument(
        "--unit",
        default="record",
        help="what each epsilon protects: record, or owner with all of their records [record]",
    )
    command.add_argument(
        "--sampling", help="what is drawn at each step: record or owner [the same as --unit]"
    )
    command.add_argument(
        "--records-per-owner",
        type=_whole_or_all,
        default=8,
        help="with --sampling owner: records of an owner in one step, or all [8]",
    )
    command.add_argument(
        "--owners",
        action="store_true",
        help="print one row per owner instead of one per budget class",
    )
    command.add_argument("--json", action="store_true", help="print the table as JSON")
    command.add_argument(
        "--out", type=Path, help="write the plan to this file (JSON), and its arrays next to it"
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.mechanisms import as_statistics
    from ownerwise.owners import Hints, Owners
    from ownerwise.planning import PlanRequest, make_plan
    from ownerwise.repair import as_calibration

    options.calibration = as_calibration(options.calibration)
    if options.statistics is not None:
        options.statistics = as_statistics({"share": options.statistics})
    arguments = {field.name for field in fields(PlanRequest)} & set(vars(options))
    request = PlanRequest(**{name: getattr(options, name) for name in arguments})
    problems = Problems()
    owners = None
    levels = _levels(options.level, problems)
    hints = Hints(levels="pass --level NAME=EPSILON", records="add a records column")
    with problems.guard():
        owners = Owners(None, options.budgets, options.delta, levels=levels, hints=hints)
    problems.add(*_request_problems(owners, options.budgets, request))
    if options.out is not None:
        problems.add(*_out_problems(options.out))
    problems.raise_()
    assert owners is not None
    if owners.records_basis == ASSUMED and request.sampling != "owner":
        print(f"ownerwise: warning: {NO_RECORDS.format(options.budgets)}", file=sys.stderr)
    new_plan = make_plan(owners, request)
    if options.out is not None:
        new_plan.save(options.out)
    if options.json:
        rows = [row.figures() for row in new_plan.rows(owners=options.owners)]
        print(json.dumps({**new_plan.header(), "hash": new_plan.hash, "rows": rows}, indent=2))
        return
    print(new_plan.describe(owners=options.owners))
    print(f"Verified by {new_plan.verify()}.")
    if options.out is not None:
        print(f"Written to {options.out}.")


def _request_problems(owners: Owners | None, budgets: Path, request: PlanRequest) -> list[str]:
    """Return all problems with the request, given the record counts that the table declares."""
    if owners is None or owners.records_basis != ASSUMED or request.sampling == "owner":
        return request.problems(None if owners is None else int(request.elements(owners).sum()))
    problems = request.problems()
    if request.batch_size is not None and request.batch_size > len(owners):
        problems.append(
            f"batch_size {request.batch_size:g} exceeds the number of owners ({len(owners)}); "
            f"{NO_RECORDS.format(budgets)}"
        )
    return problems


def _out_problems(out: Path) -> list[str]:
    """Return any reasons not to write a plan to `out`; only another plan may be overwritten."""
    from ownerwise.planning import Plan

    if out.is_dir():
        return [IS_A_FOLDER.format(out)]
    if out.exists():
        try:
            Plan.load(out)
        except PlanError:
            return [f"--out {out} already exists and is not a plan: choose another name"]
    return []


def number(text: str) -> float:
    """Parse a number in ordinary notation; argparse reports any other text as an error."""
    from ownerwise.owners.tables import plain_number

    return plain_number(text)


def _whole_or_all(text: str) -> int | str:
    return text if text == "all" else int(text)


def _levels(pairs: Sequence[str], problems: Problems) -> dict[str, float] | None:
    from ownerwise.owners.tables import plain_number

    levels = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            levels[name.strip()] = plain_number(value)
        except ValueError:
            problems.add(f"--level {pair}: expected NAME=EPSILON, such as high=0.5")
    return levels or None
