"""`ownerwise plan`: turn a table of budgets into a plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ownerwise.errors import IS_A_FOLDER, PlanError, Problems

if TYPE_CHECKING:
    from ownerwise.owners import Owners
    from ownerwise.planning import Plan, PlanRequest

ASSUMED = "assumed one each"
NO_RECORDS = "{} has no records column, so one record per owner is assumed; add the column"


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "plan",
        help="turn a table of budgets into sampling rates, clip norms and noise",
        description="Turn a table of budgets (CSV or Parquet with the columns owner, epsilon and, "
        "optionally, delta and records) into a verified plan. Specify two of --steps, --batch-size "
        "and --noise-multiplier; the third follows from the budgets. With --method individual, "
        "specify --steps, and --clipped-steps or --noise-multiplier.",
    )
    command.set_defaults(command=_run)
    command.add_argument("budgets", type=Path, help="CSV or Parquet file, one row per owner")
    command.add_argument(
        "--method", default="sample", help="uniform, sample, scale, both or individual [sample]"
    )
    command.add_argument("--steps", type=int, help="number of steps")
    command.add_argument(
        "--epochs",
        type=float,
        help="expected number of times that a record is drawn, instead of --steps",
    )
    command.add_argument("--batch-size", type=float, help="expected number of records per step")
    command.add_argument(
        "--noise-multiplier", type=float, help="noise standard deviation divided by the clip norm"
    )
    command.add_argument(
        "--clip-norm",
        type=_number_or_adaptive,
        default=1.0,
        metavar="CLIP_NORM",
        help="bound on a record's gradient norm, or adaptive [1.0]",
    )
    command.add_argument(
        "--clip-quantile",
        type=float,
        metavar="QUANTILE",
        help="let the clip norm follow this quantile of the gradient norms, starting at "
        "--clip-norm",
    )
    command.add_argument(
        "--mixture",
        type=float,
        help="for --method both: from 0 (sample) to 1 (scale) [0.5]; for --method individual: from "
        "0 (one clip norm) to 1 (clip norms by budget) [1]",
    )
    command.add_argument(
        "--clipped-steps",
        type=float,
        help="for --method individual: number of steps that a budget pays for if every gradient is "
        "clipped [the same as --steps]",
    )
    command.add_argument(
        "--filter", help="for --method individual: gdp, rdp or zcdp, how costs add up [gdp]"
    )
    command.add_argument(
        "--clip-to-remaining",
        action="store_true",
        help="for --method individual: let a record take part once more, clipped to what remains "
        "of its budget",
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
    command.add_argument(
        "--advise",
        action="store_true",
        help="instead of a plan, show which noise these budgets allow for several numbers of steps "
        "and batch sizes, and which to try",
    )
    command.add_argument("--json", action="store_true", help="print the table as JSON")
    command.add_argument(
        "--out",
        type=Path,
        help="write the plan to this file (JSON), and its arrays next to it; with --advise, write "
        "an HTML page",
    )


def _run(options: argparse.Namespace) -> None:
    from ownerwise.mechanisms import as_statistics
    from ownerwise.owners import Hints, Owners
    from ownerwise.planning import PlanRequest, make_plan
    from ownerwise.repair import as_calibration

    options.calibration = as_calibration(options.calibration)
    options.clip_norm = _clip_norm(options.clip_norm, options.clip_quantile)
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
    if options.advise:
        problems.add(*_advice_problems(request, options.out))
    else:
        problems.add(*_request_problems(owners, options.budgets, request))
        if options.out is not None:
            problems.add(*_out_problems(options.out))
    problems.raise_()
    assert owners is not None
    if owners.records_basis == ASSUMED and request.sampling != "owner":
        print(f"ownerwise: warning: {NO_RECORDS.format(options.budgets)}", file=sys.stderr)
    if options.advise:
        _advise(owners, request, options)
        return
    new_plan = make_plan(owners, request)
    if options.out is not None:
        new_plan.save(options.out)
    if options.json:
        rows = [row.figures() for row in new_plan.rows(owners=options.owners)]
        print(json.dumps({**new_plan.header(), "hash": new_plan.hash, "rows": rows}, indent=2))
        warn_of_useless(new_plan)
        return
    print(new_plan.describe(owners=options.owners))
    print(f"Verified by {new_plan.verify()}.")
    if options.out is not None:
        print(f"Written to {options.out}.")


def warn_of_useless(plan: Plan) -> None:
    """Print a warning for each reason why the plan cannot be of use."""
    for concern in plan.concerns:
        print(f"ownerwise: warning: plan of no use: {concern}", file=sys.stderr)


def _advice_problems(request: PlanRequest, out: Path | None) -> list[str]:
    """Return the problems with the settings that `--advise` uses, and with those it replaces."""
    names = ("steps", "epochs", "batch_size", "noise_multiplier")
    given = [name for name in names if getattr(request, name) is not None]
    if request.method == "individual":
        from ownerwise.planning.individual import NO_ADVICE

        return [NO_ADVICE]
    problems = [
        f"--{name.replace('_', '-')} with --advise: expected neither steps, batch size nor noise, "
        "because it shows several of them; leave it out"
        for name in given
    ]
    settings = replace(request, steps=1, epochs=None, batch_size=1.0, noise_multiplier=None)
    problems += settings.problems()
    if out is not None and out.is_dir():
        problems.append(IS_A_FOLDER.format(out))
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        problems.append(f"--out {out} with --advise: expected a name that ends in .html")
    return problems


def _advise(owners: Owners, request: PlanRequest, options: argparse.Namespace) -> None:
    from ownerwise.cli.advice import advice_html, advice_text
    from ownerwise.files import write_text
    from ownerwise.planning import advise

    advice = advise(owners, request)
    print(json.dumps(asdict(advice), indent=2) if options.json else advice_text(advice))
    if options.out is not None:
        write_text(options.out, advice_html(advice))
        print(f"Written to {options.out}.", file=sys.stderr if options.json else sys.stdout)


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


def _number_or_adaptive(text: str) -> float | str:
    try:
        return text if text == "adaptive" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or adaptive") from None


def _clip_norm(given: float | str, quantile: float | None) -> Any:
    """Return the clip norm: a number, "adaptive", or a table of options if there is a quantile."""
    if quantile is None:
        return given
    initial = {} if given == "adaptive" else {"initial": given}
    return {"quantile": quantile, **initial}


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
