"""Turn a configuration into a run that is ready to start, for `ownerwise train`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ownerwise import data as data_sets
from ownerwise import models
from ownerwise.config.extraction import with_features
from ownerwise.config.reading import Config, model_options
from ownerwise.config.sections import OPTIMIZERS
from ownerwise.data import ASSIGNMENTS, Assignment, DataSet, Records, assign
from ownerwise.data.splits import content_rows, held_out
from ownerwise.errors import OwnerwiseError, PlanError, name_some
from ownerwise.mechanisms import (
    INO,
    ORDERS,
    AutoS,
    BudgetAware,
    ClippingRule,
    ImportanceSampling,
    Loss,
    Psac,
    Standard,
    Steps,
)
from ownerwise.owners import Hints, Owners, text_ids
from ownerwise.planning import Plan, plan
from ownerwise.randomness import SecretStream
from ownerwise.runs import PLAN, Run, holds_a_run
from ownerwise.training import Trainer

_HINTS = Hints(
    record_owner="the data",
    levels="set owners.levels = { high = 0.5, ... }",
    records="set owners.budgets to a file with a records column",
)
_SINGLE_LOGIT = functional.binary_cross_entropy_with_logits
_CLIPPING = {
    "standard": Standard,
    "auto_s": AutoS,
    "psac": Psac,
    "importance": ImportanceSampling,
}


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start: the Trainer, its data, and the groups of its records."""

    trainer: Trainer
    data: DataSet
    assignment: Assignment
    validation: Records | None
    test: Records | None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.trainer.plan

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.trainer.folder is not None
        return self.trainer.folder

    def fit(self, resume: bool = False) -> Run:
        """Train the model, or resume training, and return the run."""
        options: dict[str, Any] = {}
        for name, records in (("validation", self.validation), ("test", self.test)):
            if records is not None:
                options[name] = _pair(records, self.trainer.loss)
                options[f"{name}_groups"] = self.assignment.groups(records)
        return self.trainer.fit(_pair(self.data.train, self.trainer.loss), resume=resume, **options)


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
    place = Path(folder or run.get("folder") or Path("runs") / name)
    parts = split_records(load_data(config, data_dir), config["data"])
    data, validation, test = with_features(*parts, config["data"])
    problems: list[str] = []
    model = make_model(config, data, problems)
    try:
        assignment, owners = make_owners(config, data)
        run_plan = stored_plan(place, owners) if resume else None
        run_plan = plan(owners, **config["plan"]) if run_plan is None else run_plan
    except OwnerwiseError as error:
        raise OwnerwiseError(problems + error.problems) from None
    if model is None:
        raise OwnerwiseError(problems)
    trainer = Trainer(
        model,
        run_plan,
        **training_options(config),
        **{key: value for key, value in run.items() if key not in ("name", "folder")},
        folder=place,
        name=name,
        group_budgets=assignment.group_budgets,
        progress=progress,
        notes=_notes(config, data, assignment),
    )
    return PreparedRun(trainer, data, assignment, validation, test)


def load_data(config: Config, data_dir: str | PathLike | None) -> DataSet:
    """Return the data set or the table that the configuration specifies."""
    settings = dict(config["data"])
    only = settings.pop("only", None)
    for key in ("validation_share", "validation_seed", "extractor"):
        settings.pop(key, None)
    if "name" in settings:
        data = data_sets.load(settings["name"], data_dir, **settings.get("options", {}))
    else:
        data = data_sets.load_table(config.base / settings.pop("file"), **settings)
    return data if only is None else data.only(only)


def split_records(
    data: DataSet, settings: Mapping[str, Any]
) -> tuple[DataSet, Records | None, Records | None]:
    """Return the data (without held-out records), the validation records and the test records.

    With `validation_share`, each training record is held out with that probability, as determined
    by a public hash of the record alone (see `ownerwise.data.splits`); no guarantee covers the
    held-out records. Otherwise, the validation part of the data set is used or, if there is none,
    its test part, which is then not evaluated separately.
    """
    share = settings.get("validation_share")
    if share is None:
        return (
            (data, data.test, None)
            if data.validation is None
            else (data, data.validation, data.test)
        )
    train = data.train
    rows = content_rows([train.inputs, train.targets, *train.columns.values()])
    held = held_out(rows, share, "validation", settings.get("validation_seed", 0))
    if not held.any() or held.all():
        raise OwnerwiseError(
            f"data.validation_share {share:g} holds out {'all' if held.any() else 'none'} of the "
            "training records; expected some, but not all: choose another share"
        )
    return replace(data, train=train.take(~held)), train.take(held), data.test


def make_owners(config: Config, data: DataSet) -> tuple[Assignment, Owners]:
    """Return the assignment of records to owners, and the owners with their budgets."""
    settings = config["owners"]
    delta = settings.get("delta")
    if "assignment" in settings:
        options = dict(settings["assignment"])
        kind = options.pop("kind")
        try:
            assignment = ASSIGNMENTS[kind](data, **options)
        except TypeError as error:
            raise OwnerwiseError(f"owners.assignment {kind}: {error}") from None
        owners = Owners(assignment.record_owner, assignment.epsilon, delta, hints=_HINTS)
        return assignment, owners
    column = settings.get("column", "owner")
    ids = data.train.columns.get(column)
    if ids is None:
        known = ", ".join(data.train.columns) or "none"
        raise OwnerwiseError(
            f"owners.column {column!r} is not in the data; {data.name} has the columns {known}"
        )
    table: Any = settings.get("epsilon")
    if table is None:
        table = config.base / settings["budgets"]
    elif ids.dtype.kind == "i":  # TOML keys are text
        table = dict(zip(_whole_keys(table), table.values(), strict=True))
    owners = Owners(ids, table, delta, levels=settings.get("levels"), hints=_HINTS)
    _warn_of_other_counts(owners)
    budgets = dict(zip(owners.ids.tolist(), owners.epsilon.tolist(), strict=True))
    return assign.by_column(data, column, budgets), owners


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
    counts = np.bincount(owners.record_owner_index, minlength=len(owners))
    other = np.flatnonzero(counts != owners.records)
    if len(other):
        named = name_some(
            other, lambda at: f"{owners.ids[at]} declares {owners.records[at]}, has {counts[at]}"
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
        return None  # comparing with a new plan shows all differences


def make_model(config: Config, data: DataSet, problems: list[str]) -> torch.nn.Module | None:
    """Return the model; by default its numbers of inputs and classes are taken from the data."""
    options = dict(config["model"])
    name = options.pop("name")
    known = model_options(name)
    outputs = 1 if config["training"].get("loss") == _SINGLE_LOGIT.__name__ else len(data.classes)
    fitting = {"inputs": data.train.inputs[0].size, "classes": outputs}
    options = {key: value for key, value in fitting.items() if key in known} | options
    with torch.random.fork_rng(devices=[]):
        if config["run"].get("seed") is not None:
            torch.manual_seed(config["run"]["seed"])
        try:
            return models.build(name, **options)
        except OwnerwiseError as error:
            problems += error.problems
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"model {name} cannot be built: {error}")
    return None


def training_options(config: Config) -> dict[str, Any]:
    """Return the Trainer options from the `training` and `weights` sections."""
    training = config["training"]
    momentum = {"momentum": training["momentum"]} if "momentum" in training else {}
    plain = ("lr", "schedule", "averaging", "micro_batch_size", "lean")
    return {
        **{key: training[key] for key in plain if key in training},
        "optimizer": OPTIMIZERS[training.get("optimizer", "sgd")],
        "optimizer_options": momentum | dict(training.get("options", {})),
        "loss": getattr(functional, training.get("loss", "cross_entropy")),
        "weights": make_weights(config["weights"], config["run"].get("seed")),
        "clipping": make_clipping(training.get("clipping", "standard")),
    }


def make_weights(settings: Mapping[str, Any], seed: int | None) -> INO | None:
    """Return the weighting of the records in a batch, or None; a random order uses `seed`."""
    if not settings:
        return None
    given = ("tail", "tail_length", "alpha", "beta", "width")
    options = {key: settings[key] for key in given if key in settings}
    shape = settings.get("shape", "beta")
    if shape != "beta":
        options["shape"] = Steps() if shape == "steps" else Steps(shape)
    order = settings.get("order", "loss")
    if settings.get("kappa"):
        options["score_by"] = BudgetAware(settings["kappa"])
    elif order != "loss":
        stream = None if seed is None else SecretStream.from_seed(seed)
        options["score_by"] = ORDERS[order](stream)
    return INO(**options)


def make_clipping(settings: str | Mapping[str, Any]) -> ClippingRule:
    """Return the clipping rule, given by its name or by a table with kind and options."""
    options = {"kind": settings} if isinstance(settings, str) else dict(settings)
    return _CLIPPING[options.pop("kind")](**options)


def _pair(records: Records, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (X, y); for models with a single logit, the targets have the shape of the logits."""
    inputs, targets = records.tensors()
    return inputs, targets.float()[:, None] if loss is _SINGLE_LOGIT else targets


def _notes(config: Config, data: DataSet, assignment: Assignment) -> dict[str, Any]:
    """Return the notes to store in the run's config in addition to the Trainer's settings."""
    notes: dict[str, Any] = {
        "data": f"{data.name}, {assignment.description}",
        "model": config["model"]["name"],
        "settings": {name: dict(config[name]) for name in ("data", "owners", "plan", "model")},
    }
    if data.pretraining:
        notes["pretraining"] = data.pretraining
    if data.not_private:
        notes["not_private"] = list(data.not_private)
    return notes
