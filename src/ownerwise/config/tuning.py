"""Turn a configuration with a section [tuning] into a private search, for `ownerwise tune`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from ownerwise.accounting import RunLaw, law_problems
from ownerwise.config.build import (
    HINTS,
    bounded_owners,
    has_column,
    make_loss,
    make_model,
    pair_of,
    plan_arguments,
    read_records,
    run_folder,
    run_notes,
    training_options,
)
from ownerwise.config.reading import Config, flat_keys, make_config
from ownerwise.config.splitting import owner_column
from ownerwise.data import Assignment, DataSet, Records
from ownerwise.errors import OwnerwiseError, Problems
from ownerwise.owners import Owners
from ownerwise.planning import Plan, PlanRequest
from ownerwise.repair import as_repair
from ownerwise.training import Trainer
from ownerwise.tuning import (
    Candidate,
    PaidScore,
    PublicScore,
    Search,
    expand,
    folder_problems,
    prepare_search,
)

RUNS, LAW = 10.0, "geometric"


def prepare_tuning(
    config: Config,
    *,
    folder: str | PathLike | None = None,
    data_dir: str | PathLike | None = None,
) -> Search:
    """Return the search that a configuration describes, planned and checked.

    Args:
        config: the configuration.
        folder: run folder for the result; by default the one in the configuration, else runs/NAME.
        data_dir: folder that contains the data sets.
    """
    settings = config["tuning"]
    if not settings:
        raise OwnerwiseError(
            "the configuration has no section [tuning]; expected one with space or candidates, "
            "runs and score"
        )
    law, runs = settings.get("law", LAW), settings.get("runs", RUNS)
    place = run_folder(config, folder)
    problems = Problems([*law_problems(law, runs), *folder_problems(place)])
    choices: list[tuple[dict[str, Any], Config]] = []
    with problems.guard():
        choices = _choices(config)
    problems.raise_()
    data, validation, test = read_records(config, data_dir)
    assignment, owners, data = bounded_owners(config, data, validation, test)
    candidates = [_candidate(changed, one, data, assignment, config) for changed, one in choices]
    score = _score(config, validation)
    return prepare_search(
        candidates,
        owners,
        pair_of(data.train, make_loss(config)),
        score,
        RunLaw(law, runs),
        always_run=settings.get("always_run", False),
        seed=config["run"].get("seed"),
        folder=place,
        name=config["run"].get("name", config.name),
        fit_options={} if test is None else {"test": pair_of(test, make_loss(config))},
    )


def _choices(config: Config) -> list[tuple[dict[str, Any], Config]]:
    """Return what distinguishes each candidate, and its configuration."""
    settings = config["tuning"]
    if "space" in settings:
        found = expand(flat_keys(settings["space"]))
    else:
        found = expand([flat_keys(one) for one in settings["candidates"]])
    problems, choices = Problems(), []
    for number, changed in enumerate(found, 1):
        sections = {name: dict(values) for name, values in config.sections.items()}
        for key, value in changed.items():
            section, _, name = key.partition(".")
            sections[section][name] = value
        sections["tuning"] = {}
        try:
            choices.append((changed, make_config(sections, config.base, config.name)))
        except OwnerwiseError as error:
            problems.add(*(f"candidate {number}: {problem}" for problem in error.problems))
    problems.raise_()
    return choices


def _candidate(
    changed: Mapping[str, Any], one: Config, data: DataSet, assignment: Assignment, config: Config
) -> Candidate:
    request = PlanRequest(**plan_arguments(one, training_options(one)["constraints"]))

    def make_trainer(
        plan: Plan, *, kind: type[Trainer] = Trainer, notes: Mapping[str, Any], **options: Any
    ) -> Trainer:
        training = training_options(one)
        training["constraints"] = request.constraints
        training["repair"] = as_repair(one["training"].get("repair"), plan, data.classes, one.base)
        noted = run_notes(one, data, assignment, named=False)
        return kind(make_model(one, data), plan, **training, notes={**noted, **notes}, **options)

    return Candidate(dict(changed), request, make_trainer)


def _score(config: Config, validation: Records | None) -> PublicScore | PaidScore:
    settings, loss = config["tuning"], make_loss(config)
    if "target_range" in config["data"]:
        raise OwnerwiseError(
            "tuning with data.target_range: expected a classifier; for a numeric target, tune from "
            "Python with PublicScore(..., measure=)"
        )
    if validation is None:
        raise OwnerwiseError(
            "tuning needs validation records: set data.validation_share, such as 0.2"
        )
    pair = pair_of(validation, loss)
    if settings.get("score", "paid") == "public":
        return PublicScore(pair)
    column = owner_column(config)
    if column is None or not has_column(validation, column):
        raise OwnerwiseError(
            "tuning.score 'paid' needs the owner of each validation record, who pays for it: "
            "expected a column with owners, or score = 'public' if the records are public"
        )
    if "validation_share" not in config["data"]:
        raise OwnerwiseError(
            "tuning.score 'paid' needs data.validation_share, so that a public hash of each record "
            "or owner, and not the data set's own split, decides what is held out"
        )
    owners = _owners_of_score(config, validation.columns[column])
    return PaidScore(
        pair, owners, std=settings.get("score_std"), share=settings.get("score_share", 0.02)
    )


def _owners_of_score(config: Config, ids: np.ndarray) -> Owners:
    """Return the owners of the validation records, with the budgets that they set."""
    settings = config["owners"]
    table: Any = settings.get("epsilon")
    table = config.base / settings["budgets"] if table is None else table
    if not isinstance(table, Mapping):
        every = Owners.from_table(table, settings.get("delta"), levels=settings.get("levels"))
        rows = zip(every.ids.tolist(), every.epsilon.tolist(), every.delta.tolist(), strict=True)
        budgets = {owner: (epsilon, delta) for owner, epsilon, delta in rows}
        present = set(ids.tolist()) & budgets.keys()
        return Owners(
            ids,
            {owner: budgets[owner][0] for owner in present},
            {owner: budgets[owner][1] for owner in present},
            hints=HINTS,
        )
    if ids.dtype.kind == "i":
        table = {int(owner): value for owner, value in table.items()}
    present = set(ids.tolist())
    return Owners(
        ids,
        {owner: value for owner, value in table.items() if owner in present},
        settings.get("delta"),
        levels=settings.get("levels"),
        hints=HINTS,
    )
