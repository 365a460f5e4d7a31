"""Turn a configuration into a run that is ready to start, for `ownerwise train`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.nn import functional

from ownerwise import data as data_sets
from ownerwise.config.extraction import with_features
from ownerwise.config.reading import FROM_THE_DATA, Config, scale_of, split_by
from ownerwise.config.sections import OPTIMIZERS
from ownerwise.config.splitting import owner_column, owners_of, split_records
from ownerwise.data import ASSIGNMENTS, Assignment, DataSet, Records, assign
from ownerwise.errors import OwnerwiseError, PlanError, Problems, name_some
from ownerwise.mechanisms import (
    CLIPPING_RULES,
    LOSSES,
    REGRESSION_LOSSES,
    RELEASES,
    WEIGHTS,
    ColumnStatistics,
    Loss,
    RegressionLoss,
    Standardise,
    as_statistics,
    plain_loss,
)
from ownerwise.models import BUILDERS
from ownerwise.owners import Hints, Owners, flat_ids, split_ids, text_ids
from ownerwise.planning import Plan, plan
from ownerwise.randomness import SecretStream
from ownerwise.registry import Registry
from ownerwise.repair import as_calibration, as_repair
from ownerwise.runs import ALREADY_A_RUN, PLAN, Run, holds_a_run
from ownerwise.runs.reading import read_config as read_stored
from ownerwise.step import Performance
from ownerwise.training import Trainer

HINTS = Hints(
    record_owner="the data",
    levels="set owners.levels = { high = 0.5, ... }",
    records="set owners.budgets to a file with a records column",
)
_PLAIN_OPTIONS = ("lr", "schedule", "averaging", "device")


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start: the Trainer, its data, and the groups of its records."""

    trainer: Trainer
    data: DataSet
    assignment: Assignment
    validation: Records | None
    test: Records | None
    owner_column: str | None
    """The column with each record's owner; None if owners are assigned."""
    separator: str | None
    """The text between owner ids in that column; None if every record has one owner."""
    named: bool
    """Whether results are shown under the names of owners, or under those they were assigned."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.trainer.plan

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.trainer.path is not None
        return self.trainer.path

    @property
    def training_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The training records as (X, y)."""
        return pair_of(self.data.train, self.trainer.loss)

    @property
    def statistics_concerns(self) -> list[str]:
        """The reasons why the column statistics that the plan pays for cannot be of use."""
        if self.plan.opening_std is None or not self.data.numbers:
            return []
        return ColumnStatistics().bind(self.plan).concerns(self.data.numbers)

    def fit(self, resume: bool = False) -> Run:
        """Train the model, or resume training, and return the run."""
        options: dict[str, Any] = {}
        for name, records in (("validation", self.validation), ("test", self.test)):
            if records is not None:
                options[name] = pair_of(records, self.trainer.loss)
                if self.owner_column is not None and has_column(records, self.owner_column):
                    owners = records.columns[self.owner_column]
                    if self.separator is not None:
                        owners = split_ids(owners, self.separator)
                    options[f"{name}_owners"] = owners
                if self.named:
                    options[f"{name}_groups"] = self.assignment.groups(records)
        return self.trainer.fit(self.training_data, resume=resume, **options)


def prepare_run(
    config: Config,
    *,
    folder: str | PathLike | None = None,
    data_dir: str | PathLike | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> PreparedRun:
    """Load the data, create the owners, plan and model, and return the prepared run.

    Args:
        config: the configuration.
        folder: run folder; by default the one in the configuration, else runs/NAME.
        data_dir: folder that contains the data sets (see `ownerwise.data.load`).
        resume: use the plan of the run in the folder, if there is one.
        progress: as for `Trainer`.
    """
    run = config["run"]
    name = run.get("name", config.name)
    place = run_folder(config, folder)
    if not resume and holds_a_run(place):  # before any work
        raise OwnerwiseError(ALREADY_A_RUN.format(place))
    column = owner_column(config)
    named = _owners_are_named(config, place if resume else None)
    data, validation, test = read_records(config, data_dir)
    problems = Problems()
    model = assignment = run_plan = None
    with problems.guard():
        model = make_model(config, data)
    options = training_options(config)
    with problems.guard():
        assignment, owners, data = bounded_owners(config, data, validation, test)
        run_plan = stored_plan(place, owners) if resume else None
        if run_plan is None:
            run_plan = plan(owners, **plan_arguments(config, options["constraints"]))
        given = config["training"].get("repair")
        options["repair"] = as_repair(given, run_plan, data.classes, config.base)
    problems.raise_()
    assert model is not None
    assert assignment is not None
    assert run_plan is not None
    separator = config["owners"].get("separator")
    # otherwise, nothing is evaluated per owner, and their ids would stay in the run's settings
    pooled = separator is None and any(has_column(part, column) for part in (validation, test))
    trainer = Trainer(
        model,
        run_plan,
        **options,
        **{key: value for key, value in run.items() if key not in ("name", "folder")},
        folder=place,
        name=name,
        group_budgets=assignment.group_budgets if named or pooled else None,
        progress=progress,
        notes=run_notes(config, data, assignment, named),
    )
    return PreparedRun(trainer, data, assignment, validation, test, column, separator, named)


def run_folder(config: Config, folder: str | PathLike | None) -> Path:
    """Return the run folder: `folder`, else the one in the configuration, else runs/NAME."""
    name = config["run"].get("name", config.name)
    return Path(folder or config["run"].get("folder") or Path("runs") / name)


def read_records(
    config: Config, data_dir: str | PathLike | None
) -> tuple[DataSet, Records | None, Records | None]:
    """Return the training data, the validation records and the test records."""
    column, by = owner_column(config), split_by(config)
    whole = load_data(config, data_dir)
    ids = (
        owners_of(whole.train, column, whole.name) if column is not None and by == "owner" else None
    )
    return with_features(*split_records(whole, config["data"], by, ids), config["data"])


def bounded_owners(
    config: Config, data: DataSet, validation: Records | None, test: Records | None
) -> tuple[Assignment, Owners, DataSet]:
    """Return the assignment, the owners, and the data without records beyond `max_records`."""
    assignment, owners = make_owners(config, data, [validation, test])
    if "max_records" in config["owners"]:
        owners, kept = owners.bound(config["owners"]["max_records"])
        data = replace(data, train=data.train.take(kept))
    if "assignment" not in config["owners"]:
        _warn_of_other_counts(owners)
    return assignment, owners, data


def plan_arguments(config: Config, constraints: Any) -> dict[str, Any]:
    """Return the arguments of `ownerwise.plan` that a configuration gives."""
    wanted = dict(config["plan"])
    return {
        **wanted,
        "constraints": constraints,
        "calibration": as_calibration(wanted.pop("calibration", None)),
        "statistics": as_statistics(wanted.pop("statistics", None)),
    }


def load_data(config: Config, data_dir: str | PathLike | None) -> DataSet:
    """Return the data set or the table that the configuration specifies."""
    settings = dict(config["data"])
    only = settings.pop("only", None)
    for key in ("split_by", "validation_share", "validation_seed", "extractor"):
        settings.pop(key, None)
    if "name" in settings:
        data = data_sets.load(settings["name"], data_dir, **settings.get("options", {}))
    else:
        by = split_by(config)
        if by == "owner":  # this column is not necessarily data.owner
            settings["owner"] = config["owners"].get("column", settings.get("owner"))
        settings["scale"] = scale_of(config)
        data = data_sets.load_table(config.base / settings.pop("file"), split_by=by, **settings)
    return data if only is None else data.only(only)


def make_owners(
    config: Config, data: DataSet, held_out: Sequence[Records | None] = ()
) -> tuple[Assignment, Owners]:
    """Return the assignment of records to owners, and the owners with their budgets.

    Owners whose records are all among the held-out ones are left out.
    """
    settings = config["owners"]
    delta = settings.get("delta")
    if "assignment" in settings:
        assignment = ASSIGNMENTS.make(settings["assignment"], data)
        owners = Owners(assignment.record_owner, assignment.epsilon, delta, hints=HINTS)
        return assignment, owners
    column = owner_column(config)
    assert column is not None
    ids = owners_of(data.train, column, data.name)
    held = [records.columns[column] for records in held_out if has_column(records, column)]
    evaluated = held
    if "separator" in settings:
        ids = split_ids(ids, settings["separator"])
        held = [flat_ids(split_ids(part, settings["separator"]))[0] for part in held]
    table: Any = settings.get("epsilon")
    if table is None:
        table = config.base / settings["budgets"]
    elif flat_ids(ids)[0].dtype.kind == "i":  # TOML keys are text
        table = dict(zip(_whole_keys(table), table.values(), strict=True))
    owners = Owners(
        ids,
        table,
        delta,
        levels=settings.get("levels"),
        held_out=np.concatenate(held) if held else None,
        split_by=_held_out_by(config),
        hints=HINTS,
    )
    budgets = dict(zip(owners.ids.tolist(), owners.epsilon.tolist(), strict=True))
    budgets |= owners.left_out
    if "separator" in settings:
        budgets |= _budgets_of_sets(budgets, evaluated, settings["separator"])
    named = settings.get("column", config["data"].get("owner", column))  # in the user's table
    assignment = assign.by_column(data, column, budgets)
    return replace(assignment, description=f"owners by {named}"), owners


def _budgets_of_sets(
    budgets: Mapping[Any, float], evaluated: Sequence[np.ndarray], separator: str
) -> dict[str, float]:
    """Return the smallest budget in each set of owners of evaluated records.

    In evaluation, a set of owners is a group of its own. The sets in the training data are not
    looked at: who shares which of those records is private.
    """
    by_name = {str(owner): epsilon for owner, epsilon in budgets.items()}
    found = {}
    for cell in {str(cell) for part in evaluated for cell in part.tolist()}:
        members = [part.strip() for part in cell.split(separator)]
        if len(members) > 1 and by_name.keys() >= set(members):
            found[cell] = min(by_name[owner] for owner in members)
    return found


def _held_out_by(config: Config) -> str:
    """Return what was held out: whole owners chosen by their ids alone, or anything else.

    The parts of a named data set may share owners; only a plan with unit "owner" refuses that.
    """
    by_id = "file" in config["data"] or config["plan"].get("unit") == "owner"
    return "owner" if split_by(config) == "owner" and by_id else "record"


def has_column(records: Records | None, column: str | None) -> TypeGuard[Records]:
    """Return whether there are records with this column."""
    return records is not None and column in records.columns


def _owners_are_named(config: Config, resumed: Path | None) -> bool:
    """Return whether owners, or the groups they were assigned, are named in the results.

    A run of a version without this setting named them, and continues to do so if it is `resumed`.
    """
    settings = config["owners"]
    if "assignment" in settings or "named" in settings:
        return settings.get("named", True)
    if resumed is None or not holds_a_run(resumed):
        return False
    stored = read_stored(resumed)[0].get("settings", {}).get("owners", {})
    return stored.get("named", True)


def _whole_keys(table: Mapping[str, Any]) -> list[int]:
    """Convert the keys to whole numbers, to match the owner ids in the data."""
    unlike = [key for key in table if text_ids([key]).dtype.kind != "i"]
    if unlike:
        raise OwnerwiseError(
            f"owners.epsilon has the key {name_some(unlike, ascii)}, but the owner ids in the data "
            "are whole numbers: write the keys in plain digits, without leading zeros or signs"
        )
    return text_ids(list(table)).tolist()


def _warn_of_other_counts(owners: Owners) -> None:
    """Warn if owners' record counts differ from the declared ones, which determine the rates."""
    assert owners.record_owner_index is not None
    declared = owners.records_of_holders
    counts = np.bincount(owners.record_owner_index, minlength=len(declared))
    other = np.flatnonzero(counts != declared)
    if len(other):
        named = name_some(
            other, lambda at: f"{owners.name_of(at)} declares {declared[at]}, has {counts[at]}"
        )
        ratio = counts.sum() / owners.total_records
        warnings.warn(
            "the number of training records differs from the declared number (not private): "
            f"{named}. Sampling rates are planned for the declared numbers, so batches are about "
            f"{ratio:.0%} of the planned size. Declare only the records that are not held out",
            stacklevel=2,
        )


def stored_plan(folder: Path, owners: Owners) -> Plan | None:
    """Return the plan of the run in a folder, if it was made for these owners."""
    if not holds_a_run(folder):
        return None
    try:
        return Plan.load(folder / PLAN, owners=owners)
    except PlanError:
        return None  # a comparison with a new plan will show all differences


def make_model(config: Config, data: DataSet) -> torch.nn.Module:
    """Return the model; by default, its numbers of inputs and classes match the data."""
    with torch.random.fork_rng(devices=[]):
        if config["run"].get("seed") is not None:
            torch.manual_seed(config["run"]["seed"])
        network = BUILDERS.make(config["model"], **_sizes(config, data))
        return with_statistics(network, data.numbers)


def with_statistics(network: torch.nn.Module, numbers: int) -> torch.nn.Module:
    """Return the network behind a layer that standardises this many columns, if there are any."""
    return torch.nn.Sequential(Standardise(numbers), network) if numbers else network


def _sizes(config: Config, data: DataSet) -> dict[str, int]:
    """Return the options of models that are taken from the data unless they are given."""
    single = _single_logit(make_loss(config))
    sizes = (data.train.inputs[0].size, 1 if single else len(data.classes))
    return dict(zip(FROM_THE_DATA, sizes, strict=True))


def training_options(config: Config) -> dict[str, Any]:
    """Return the Trainer options from the `training` and `weights` sections."""
    training, seed = config["training"], config["run"].get("seed")
    momentum = {"momentum": training["momentum"]} if "momentum" in training else {}
    speed = {key: training[key] for key in ("micro_batch_size", "lean") if key in training}
    return {
        **{key: training[key] for key in _PLAIN_OPTIONS if key in training},
        "optimizer": OPTIMIZERS[training.get("optimizer", "sgd")],
        "optimizer_options": momentum | dict(training.get("options", {})),
        "loss": make_loss(config),
        "weights": make_plug(WEIGHTS, config["weights"], seed),
        "clipping": make_plug(CLIPPING_RULES, training.get("clipping", "standard"), seed),
        "constraints": make_plug(RELEASES, training.get("release"), seed),
        "performance": Performance(**speed),
    }


def make_loss(config: Config) -> Loss:
    """Return the loss; with a range of the targets, that of a regression."""
    given, target_range = config["training"].get("loss"), config["data"].get("target_range")
    if target_range is None:
        return LOSSES.make(given or "cross_entropy")
    low, high = target_range
    return RegressionLoss(low, high, REGRESSION_LOSSES[given or "mse_loss"])


def make_plug(registry: Registry, given: Any, seed: int | None) -> Any:
    """Return a mechanism, or None if none is given; a randomised one may use the seed."""
    if not given:
        return None
    return registry.make(given, stream=None if seed is None else SecretStream.from_seed(seed))


def _single_logit(loss: Loss) -> bool:
    """Return whether a loss needs a single output: for the class 0 or 1, or for a number."""
    loss = plain_loss(loss)
    return (
        isinstance(loss, RegressionLoss)
        or getattr(loss, "func", loss) is functional.binary_cross_entropy_with_logits
    )


def pair_of(records: Records, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (X, y); for models with a single logit, the targets have the shape of the logits."""
    inputs, targets = records.tensors()
    single = _single_logit(loss) and not isinstance(loss, RegressionLoss)
    return inputs, targets.float()[:, None] if single else targets


def _scale(config: Config) -> dict[str, str]:
    """Return the scale that follows from paid statistics, for predictions."""
    scale = scale_of(config)
    return {"scale": scale} if scale == "released" else {}


def run_notes(config: Config, data: DataSet, assignment: Assignment, named: bool) -> dict[str, Any]:
    """Return the notes to store in the run's config in addition to the Trainer's settings."""
    notes: dict[str, Any] = {
        "data": f"{data.name}, {assignment.description}",
        "model": config["model"]["name"],
        "settings": {
            **{name: dict(config[name]) for name in ("plan", "model")},
            "data": {**config["data"], "split_by": split_by(config), **_scale(config)},
            "owners": {**config["owners"], "named": named},
        },
        "prediction": {
            "classes": list(data.classes),
            "sizes": _sizes(config, data),
            "columns": list(data.features),
        },
    }
    if data.numbers:
        notes["prediction"]["numbers"] = data.numbers
    if data.pretraining:
        notes["pretraining"] = data.pretraining
    if data.not_private:
        notes["not_private"] = list(data.not_private)
    return notes
