"""`ownerwise experiments list | run | table | tune | plans`: the papers' experiments."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ownerwise.cli.configuration import add_changes
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction import (
    budget_pages,
    claims,
    figures,
    methods,
    plan_pages,
    provenance,
    published,
    settings,
    summary,
    tables,
    tuning,
    tuning_pages,
)
from ownerwise_reproduction.results import Store, is_current
from ownerwise_reproduction.runner import FailedRuns, run_trials
from ownerwise_reproduction.settings import PROFILES, Setting
from ownerwise_reproduction.trials import Trial

EXIT_FAILED = 2
RESULTS = Path("results")
_OTHER_PAGES = {
    plan_pages.TITLE: plan_pages.PAGE,
    "Rate constraints": "constraints/index.md",
    "Tail and kappa of INO-SGD": "tail-and-kappa/index.md",
    "Repairs after training": "calibration/index.md",
    "Further releases after training": "releases/index.md",
    "Known groups and regression": "releases/groups/index.md",
    "Which repair": "repairs/index.md",
    "Calibration in every setting, without and with": "before-after/index.md",
    "Privacy per owner: owner sampling and record sampling": "owners/index.md",
    "PATE": "pate/index.md",
    "Private tuning": "tuning/index.md",
}
"""Pages that other commands write to the same folder."""
_SCIENCE = "NOT PRIVATE (research): seeds are fixed."


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "experiments",
        help="run the papers' experiments",
        description="Run the experiments of the papers on individualized privacy. The runs use "
        "fixed seeds and public data; they are for research and NOT PRIVATE.",
    )
    actions = command.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list settings and methods")
    listing.set_defaults(command=_list)
    _add_run(actions)
    _add_table(actions)
    _add_tune(actions)
    _add_plans(actions)


def _add_run(actions: Any) -> None:
    run = actions.add_parser(
        "run",
        help="run methods in settings",
        description="Run each method in each setting once per seed. Finished runs are skipped; an "
        "interrupted run resumes from its checkpoint.",
    )
    run.set_defaults(command=_run)
    _add_trial_options(run, "idp,ino", seeds=5)
    run.add_argument("--first-seed", type=int, default=0, help="first seed [0]")
    run.add_argument("--keep-runs", action="store_true", help="keep the run folders")


def _add_table(actions: Any) -> None:
    table = actions.add_parser(
        "table",
        help="write tables and figures from all results",
        description="Write a page, a JSON file and figures for every setting that has results and "
        "for every search made with `tune`. Also write README.md, an overview with the papers' "
        "claims next to our results. Studies in the folder whose runs are not among the results "
        "are kept.",
    )
    table.set_defaults(command=_table)
    table.add_argument("names", nargs="*", metavar="NAME", help="settings [all]")
    table.add_argument("--results", type=Path, default=RESULTS, help=f"folder [{RESULTS}]")
    table.add_argument("--out", type=Path, help="folder to write to [default: print the tables]")
    table.add_argument("--no-figures", action="store_true", help="write no figures")


def _add_tune(actions: Any) -> None:
    tune = actions.add_parser(
        "tune",
        help="tune every method with the same effort",
        description="Draw random values for the clip norm, the learning rate, the number of steps, "
        "and INO-SGD's tail and kappa. Every method gets the same number of draws. Values are "
        "chosen on held-out training records, never on test records. Writes NAME.json and "
        "NAME.svg.",
    )
    tune.set_defaults(command=_tune)
    _add_trial_options(tune, "idp,ino,ino-budget", seeds=3)
    tune.add_argument("--trials", type=int, default=20, help="draws per method [20]")
    tune.add_argument("--out", type=Path, help="folder to write to [RESULTS/tuning]")


def _add_plans(actions: Any) -> None:
    plans = actions.add_parser(
        "plans",
        help="make plans for settings with both accountants, without training",
        description="Make plans for settings with every method and accountant, and write "
        "plans/index.md. The page shows the noise, the strictest owners' sampling rates and clip "
        "norms, and how budgets are spent over the steps. No model is trained; data sets are read "
        "only to count records.",
    )
    plans.set_defaults(command=_plans)
    plans.add_argument(
        "names", nargs="*", metavar="NAME", help="settings [all in the papers' tables]"
    )
    plans.add_argument("--out", type=Path, required=True, help="folder to write to")
    plans.add_argument("--data-dir", type=Path, help="folder of the data sets")
    plans.add_argument("--no-figures", action="store_true", help="write no figures")


def _add_trial_options(command: argparse.ArgumentParser, wanted: str, seeds: int) -> None:
    command.add_argument("names", nargs="+", metavar="NAME", help="setting, such as MN-PC")
    command.add_argument(
        "--method", default=wanted, help=f"methods from `list`, separated by commas [{wanted}]"
    )
    command.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds [{seeds}]")
    command.add_argument("--profile", default="paper", help=f"{' or '.join(PROFILES)} [paper]")
    command.add_argument("--steps", type=int, help="number of steps [as in the setting]")
    command.add_argument("--clipping", help="clipping rule: standard, auto-s, psac or importance")
    command.add_argument("--accountant", help="pld or rdp")
    add_changes(command, "setting")
    command.add_argument("--results", type=Path, default=RESULTS, help=f"folder [{RESULTS}]")
    command.add_argument("--jobs", type=int, default=1, help="parallel processes [1]")


def _list(options: argparse.Namespace) -> None:
    for name in settings.names():
        found = settings.setting(name)
        plan = found.configure(0)["plan"]
        print(f"{name:<18} {found.title} ({plan['method']}, {plan['steps']} steps)")
    print(f"\nMethods: {', '.join(methods.KINDS)}")


def _run(options: argparse.Namespace) -> None:
    chosen, wanted = _asked(options)
    trials = [
        Trial(setting, method, options.first_seed + seed, options.profile, changes(options))
        for setting in chosen
        for seed in range(options.seeds)
        for method in wanted
    ]
    store = Store(options.results)
    _run_all(trials, store, options, keep_runs=options.keep_runs)
    print(f"The results are in {store.folder}. {_SCIENCE}")


def _table(options: argparse.Namespace) -> None:
    stored = Store(options.results).read()
    found = [result for result in stored if is_current(result)]
    if len(found) < len(stored):
        print(
            f"{len(stored) - len(found)} results are left out because their settings have changed",
            file=sys.stderr,
        )
    names = [setting.name for setting in _known(options.names)]
    if names:
        found = [result for result in found if result["setting"] in names]
    studies = summary.studies(found)
    if not studies:
        raise OwnerwiseError(f"no results for {', '.join(names) or 'any setting'}")
    if options.out is None:
        print(tables.overview(studies), end="")
        return
    for heading, lost in published.lost_methods(options.out, studies).items():
        print(
            f"{heading}: the published results of {', '.join(lost)} are dropped, because their "
            "runs are not among the results; run them again to keep them",
            file=sys.stderr,
        )
    searches = tuning_pages.read(options.results / "tuning", names)
    pictures, drawn = {}, not options.no_figures
    if drawn:
        pictures = {study.name: figures.write_figures(study, options.out) for study in studies}
    further = tuning_pages.write_pages(searches, options.out, figures=drawn)
    further |= budget_pages.write_page(studies, options.out)
    for title, page in _OTHER_PAGES.items():
        if (options.out / page).exists():
            further[title] = page
    earlier = published.read(options.out).without([study.name for study in studies])
    written = tables.write_tables(
        studies,
        options.out,
        pictures,
        findings=earlier.completed(claims.find(claims.read(), studies)),
        further={**earlier.further, **further},
        earlier=earlier.sections,
    )
    print(f"{len(studies)} settings. Written to {options.out}: {written[0].name} and other files.")


def _plans(options: argparse.Namespace) -> None:
    chosen = _known(options.names or plan_pages.SETTINGS)
    planned = [plan_pages.make_plans(setting, options.data_dir) for setting in chosen]
    words = [*provenance.PROGRAM.split(), "plans", *options.names, "--out", str(options.out)]
    written = plan_pages.write_page(
        planned, options.out, shlex.join(words), figures=not options.no_figures
    )
    print(f"Written to {', '.join(map(str, written))}.")


def _tune(options: argparse.Namespace) -> None:
    chosen, wanted = _asked(options)
    seeds = range(options.seeds)
    store = Store(options.results / "tuning")
    folder = options.out or store.folder
    asked = changes(options)
    for setting in chosen:
        drawn = tuning.draw(setting, options.profile, asked, options.trials)
        trials = tuning.tuning_trials(setting, wanted, drawn, seeds, options.profile, asked)
        flat = [trial for group in trials.values() for trial in group]
        paths = _run_all(flat, store, options)
        results = iter([store.read_one(path) for path in paths])
        by_point = {key: [next(results) for _ in group] for key, group in trials.items()}
        points = tuning.points(drawn, by_point)
        command = provenance.command(
            "tune",
            setting.name,
            [method.spec for method in wanted],
            seeds,
            options.profile,
            asked,
            ["--trials", str(options.trials)],
        )
        written = tuning.write(setting.name, points, options.trials, seeds, command, folder)
        print(f"Written to {', '.join(map(str, written))}. {_SCIENCE}")


def _run_all(
    trials: Sequence[Trial], store: Store, options: argparse.Namespace, keep_runs: bool = False
) -> list[Path]:
    """Run trials; if some fail, exit with an error after the others have finished."""
    try:
        return run_trials(
            trials, store, data_dir=options.data_dir, jobs=options.jobs, keep_runs=keep_runs
        )
    except FailedRuns as error:
        print(f"ownerwise: some runs failed; results are in {store.folder}", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


def _asked(options: argparse.Namespace) -> tuple[list[Setting], list[methods.Method]]:
    """Return the requested settings and methods, or raise an error that lists all problems."""
    problems: list[str] = []
    chosen = _settings(options.names, problems)
    wanted: list[methods.Method] = []
    try:
        wanted = methods.parse(options.method)
    except OwnerwiseError as error:
        problems += error.problems
    for name in ("seeds", "jobs", "trials"):
        if getattr(options, name, 1) < 1:
            problems.append(f"--{name} {getattr(options, name)}: expected at least 1")
    for setting in chosen:
        for method in wanted:
            try:
                Trial(setting, method, 0, options.profile, changes(options)).config  # noqa: B018
            except OwnerwiseError as error:
                problems += [f"{setting.name}, {method.slug}: {text}" for text in error.problems]
    if problems:
        raise OwnerwiseError(list(dict.fromkeys(problems)))
    return chosen, wanted


def _known(names: Sequence[str]) -> list[Setting]:
    """Return the settings with these names, or raise an error that lists all problems."""
    problems: list[str] = []
    found = _settings(names, problems)
    if problems:
        raise OwnerwiseError(problems)
    return found


def _settings(names: Sequence[str], problems: list[str]) -> list[Setting]:
    found = []
    for name in names:
        try:
            found.append(settings.setting(name))
        except OwnerwiseError as error:
            problems += error.problems
    return found


def changes(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the changes to a setting that the options request, as "section.key=value" strings."""
    found = list(options.changes)
    if options.steps is not None:
        found.append(f"plan.steps={options.steps}")
    if options.clipping is not None:
        found.append(f'training.clipping="{options.clipping.replace("-", "_")}"')
    if options.accountant is not None:
        found.append(f'plan.accountant="{options.accountant}"')
    return tuple(found)
