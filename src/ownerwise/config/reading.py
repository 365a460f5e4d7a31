"""Configuration files for `ownerwise train`: every key is checked, and all problems are listed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.config import placeholders
from ownerwise.config.sections import ASSIGNMENT_KEYS, OPEN, SECTIONS
from ownerwise.data import ASSIGNMENTS, LOADERS
from ownerwise.data.declarations import declarations
from ownerwise.data.splits import SPLITS, split_by_problems
from ownerwise.errors import OwnerwiseError, Problems, known_names
from ownerwise.mechanisms import (
    CLIPPING_RULES,
    LOSSES,
    REGRESSION_LOSSES,
    RELEASES,
    WEIGHTS,
    as_statistics,
)
from ownerwise.models import BUILDERS
from ownerwise.models.features import EXTRACTORS
from ownerwise.planning import PlanRequest
from ownerwise.registry import Registry, split
from ownerwise.repair import REPAIRS, as_calibration
from ownerwise.training import LOGGERS, schedule_problems
from ownerwise.training.values import ValueRule, whole

FROM_THE_DATA = ("inputs", "classes")
"""Model options that are taken from the data unless they are set."""

_OF_TABLES = (
    "target", "owner", "features", "missing", "classes", "target_range", "columns", "scale",
    "test_share",
)  # fmt: skip
_NAMED = (
    ("clipping", "kind", CLIPPING_RULES),
    ("release", "kind", RELEASES),
)
_MANY = 10**9  # number of steps to assume if it is unknown


@dataclass(frozen=True)
class Config:
    """A valid configuration.

    Attributes:
        sections: {section: {key: value}}; every section is present, possibly empty.
        base: folder that paths in the configuration are relative to.
        name: name of the file, without its suffix.
    """

    sections: Mapping[str, Mapping[str, Any]]
    base: Path
    name: str

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self.sections[section]


def read_config(path: str | PathLike, changes: Sequence[str] = ()) -> Config:
    """Return the configuration in a TOML file.

    Args:
        path: the file.
        changes: strings of the form "section.key=value", with values as in TOML (strings
            need no quotes).

    Raises:
        OwnerwiseError: if the file has problems; the message lists all of them.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OwnerwiseError(f"there is no configuration file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OwnerwiseError(f"{path} is not TOML: {error}") from None
    return make_config(content, path.parent, path.stem, changes)


def make_config(
    content: Mapping[str, Any],
    base: str | PathLike = ".",
    name: str = "run",
    changes: Sequence[str] = (),
) -> Config:
    """Return a configuration from its sections, with changes as in `read_config`."""
    problems: list[str] = []
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, values in content.items():
        if section not in SECTIONS:
            problems.append(f"section [{section}] is unknown; {known_names(section, SECTIONS)}")
        elif not isinstance(values, Mapping):
            problems.append(f"{section} is {values!r}; expected a section [{section}] with keys")
        else:
            sections[section] = dict(values)
    for change in changes:
        _apply(change, sections, problems)
    problems += placeholders.fill(sections)
    for section, keys in SECTIONS.items():
        if section not in OPEN:
            problems += _key_problems(section, sections[section], keys)
    for check in (
        _run_problems,
        _data_problems,
        _owner_problems,
        _plan_problems,
        _model_problems,
        _training_problems,
        _weight_problems,
        _tuning_problems,
    ):
        problems += check(sections)
    if problems:
        raise OwnerwiseError(problems)
    return Config(sections, Path(base), name)


def _apply(change: str, sections: dict[str, dict[str, Any]], problems: list[str]) -> None:
    """Apply a change "section.key=value"; longer keys set values inside nested tables."""
    path, equals, text = change.partition("=")
    section, *keys = path.strip().split(".")
    if not equals or not keys or not all(keys):
        problems.append(f"--set {change}: expected section.key=value, such as training.lr=0.5")
        return
    if section not in sections:
        problems.append(f"--set {change}: no section {section}; {known_names(section, SECTIONS)}")
        return
    place = sections[section]
    for key in keys[:-1]:
        inner = place.get(key)
        place[key] = dict(inner) if isinstance(inner, Mapping) else {}
        place = place[key]
    try:
        place[keys[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[keys[-1]] = text.strip()


def _key_problems(
    where: str, content: Mapping[str, Any], keys: Mapping[str, ValueRule]
) -> Iterator[str]:
    for key, value in content.items():
        if key not in keys:
            yield f"{where}.{key} is unknown; {known_names(key, keys)}"
        elif not keys[key].fits(value):
            yield keys[key].problem(f"{where}.{key}", value)


def _placed(place: str, keys: Iterable[str], problems: Iterable[str]) -> Iterator[str]:
    """Prefix each problem with its place; a problem with a single key starts with that key."""
    for text in problems:
        named = text.split()[0].rstrip(":") in keys
        yield f"{place}.{text}" if named else f"{place}: {text}"


def _named_problems(registry: Registry, given: Any, place: str, key: str) -> Iterator[str]:
    """Yield the problems with a name and its options, including problems with option values."""
    of_name = f"{place}.{key}" if isinstance(given, Mapping) else place
    if problems := registry.problems(given, of_name, f"{place}."):
        yield from problems
        return
    try:
        registry.make(given)
    except OwnerwiseError as error:
        yield from _placed(place, registry.options(split(given)[0]), error.problems)


def _run_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    loggers = sections["run"].get("loggers", [])
    if not isinstance(loggers, list):
        yield SECTIONS["run"]["loggers"].problem("run.loggers", loggers)
        return
    for logger in loggers:
        yield from LOGGERS.problems(logger, "run.loggers")


def _data_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["data"]
    extractor = content.get("extractor")
    if isinstance(extractor, Mapping):
        yield from EXTRACTORS.problems(extractor, "data.extractor.name", "data.extractor.")
    yield from _split_problems(sections)
    if ("name" in content) == ("file" in content):
        yield "data needs either a name (a known data set) or a file (your own table)"
        return
    if "file" in content:
        yield from _regression_problems(sections)
        if "target" not in content:
            yield "data.target is missing; expected the column with the class of each record"
        if "options" in content:
            yield (
                "data.options applies only to a named data set; for a file, set keys such as "
                "data.features"
            )
        yield from _table_problems(sections)
        return
    for key in _OF_TABLES:
        if key in content:
            yield f"data.{key} applies only to a file; for a named data set, use data.options"
    name, options = content["name"], content.get("options", {})
    if isinstance(name, str) and isinstance(options, Mapping):
        yield from LOADERS.problems({**options, "name": name}, "data.name", "data.options.")


def _regression_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a regression, which `data.target_range` declares, cannot be combined with."""
    if "target_range" not in sections["data"]:
        return
    given = {
        "data.classes": sections["data"].get("classes"),
        "data.only": sections["data"].get("only"),
        "plan.calibration": sections["plan"].get("calibration"),
        "training.repair": sections["training"].get("repair"),
        "owners.assignment": sections["owners"].get("assignment"),
    }
    for key, value in given.items():
        if value:
            yield (
                f"{key} with data.target_range: it applies to classes, and a numeric target has "
                "none; leave one of them out"
            )


def _table_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems with what is declared about a table's columns."""
    content, problems = sections["data"], Problems()
    if isinstance(features := content.get("features"), Mapping):
        with problems.guard():
            declarations(features)
    yield from problems
    given, paid = content.get("scale"), bool(sections["plan"].get("statistics"))
    if paid and given not in (None, "released"):
        yield (
            f"data.scale {given!r} with plan.statistics: expected one of them, because paid "
            "statistics determine the scale: leave out data.scale"
        )
    if given == "released" and not paid:
        yield (
            "data.scale 'released' without plan.statistics: expected both, because the plan must "
            "pay for the statistics: set plan.statistics = true"
        )


def scale_of(sections: Mapping[str, Any] | Config) -> str:
    """Return how a table's numbers are scaled; statistics that are paid for are used."""
    paid = bool(sections["plan"].get("statistics"))
    return sections["data"].get("scale", "released" if paid else "ranges")


_SPLIT = {"file", "validation_share"}  # settings with which the data is split here


def _split_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why the data cannot be split as requested."""
    content, by = sections["data"], split_by(sections)
    if content.get("split_by") in SPLITS:
        yield from _placed("data", ["split_by"], split_by_problems(by, _unit(sections)))
    if "assignment" in sections["owners"]:
        if content.get("split_by") == "owner":
            yield (
                "data.split_by 'owner' applies to owners in a column of the data, not to an "
                "assignment: leave it out"
            )
    elif by == "owner" and content.get("scale") == "statistics" and "validation_share" in content:
        yield (
            "data.scale 'statistics' with data.split_by 'owner' and data.validation_share: "
            "expected at most two of them, because held-out owners would enter the statistics: "
            "declare ranges (data.features), or leave out validation_share to use the test part"
        )
    if by == "owner" and "separator" in sections["owners"] and content.keys() & _SPLIT:
        yield (
            "owners.separator with data.split_by 'owner' (the default if plan.unit is 'owner'): a "
            "record of a held-out owner may belong to a training owner too. Train from Python, "
            "where you choose the parts (Trainer.fit), or plan with unit 'record' and split by "
            "record"
        )


def _unit(sections: Mapping[str, Any] | Config) -> Any:
    return sections["plan"].get("unit", "record")


def split_by(sections: Mapping[str, Any] | Config) -> str:
    """Return how a configuration splits its data: by "record" or by "owner".

    The default is the plan's unit of privacy. It never depends on the data. An assignment simulates
    owners after the data has been split.
    """
    by_default = "record" if "assignment" in sections["owners"] else _unit(sections)
    return sections["data"].get("split_by", by_default)


def _owner_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["owners"]
    given = [key for key in ("budgets", "epsilon", "assignment") if key in content]
    if len(given) != 1:
        yield (
            f"owners has {' and '.join(given) or 'no budgets'}; expected one of budgets (a file), "
            "epsilon (a table) or assignment"
        )
        return
    if given == ["assignment"]:
        for key in ("column", "separator", "max_records", "levels", "named"):
            if key in content:
                yield f"owners.{key} applies only to budgets or epsilon, not to an assignment"
        if isinstance(content["assignment"], Mapping):
            yield from _assignment_problems(content["assignment"])
        return
    if not str(content.get("separator", ";")).strip():
        yield "owners.separator is blank; expected a visible text between owner ids, such as ';'"
    if "column" not in content and "owner" not in sections["data"]:
        yield (
            "the owner of each record is missing; expected data.owner (a column of the file) or "
            "owners.column (a column of the data set)"
        )


def _assignment_problems(content: Mapping[str, Any]) -> Iterator[str]:
    place = "owners.assignment"
    yield from ASSIGNMENTS.problems(content, f"{place}.kind", f"{place}.")
    known = {key: value for key, value in content.items() if key in ASSIGNMENT_KEYS}
    yield from _key_problems(place, known, ASSIGNMENT_KEYS)


def _plan_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = {key: value for key, value in sections["plan"].items() if key in SECTIONS["plan"]}
    problems = Problems()
    with problems.guard():
        content["calibration"] = as_calibration(content.pop("calibration", None))
    with problems.guard():
        content["statistics"] = as_statistics(content.pop("statistics", None))
    problems += PlanRequest(**content).problems()
    yield from _placed("plan", sections["plan"], problems)


def _model_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    yield from BUILDERS.problems(sections["model"], "model.name", "model.", FROM_THE_DATA)


def _training_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["training"]
    if "lr" not in content:
        yield f"training.lr is missing; expected {SECTIONS['training']['lr'].expected}"
    optimizer = content.get("optimizer", "sgd")
    if "momentum" in content and optimizer not in ("sgd", "rmsprop"):
        yield f"training.momentum applies only to sgd and rmsprop, not to {optimizer}"
    steps = sections["plan"].get("steps")
    steps = steps if whole(1).fits(steps) else _MANY
    schedule = content.get("schedule", "constant")
    yield from _placed("training", ["schedule"], schedule_problems(schedule, steps))
    yield from _loss_problems(sections)
    for key, of_name, registry in _NAMED:
        if key in content:
            yield from _named_problems(registry, content[key], f"training.{key}", of_name)
    if "repair" in content:
        yield from _repair_problems(content["repair"])


def _loss_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems with the loss, which depends on whether the target is numeric."""
    given, regression = sections["training"].get("loss"), "target_range" in sections["data"]
    of_numbers = isinstance(given, str) and given in REGRESSION_LOSSES
    if regression and not (given is None or of_numbers):
        yield (
            f"training.loss is {given!r} with data.target_range; "
            f"{known_names(given, REGRESSION_LOSSES)}"
        )
    elif of_numbers and not regression:
        yield (
            f"training.loss {given!r} needs data.target_range, the public range of a numeric "
            "target, such as [0, 200]"
        )
    elif given is not None and not regression:
        yield from _named_problems(LOSSES, given, "training.loss", "name")


def _repair_problems(given: Any) -> Iterator[str]:
    """Yield the problems with a repair's options; their values need the plan and the classes."""
    if not isinstance(given, Mapping):
        yield SECTIONS["training"]["repair"].problem("training.repair", given)
        return
    described = {"name": "pull", **given}
    yield from REPAIRS.problems(described, "training.repair.name", "training.repair.")
    if not isinstance(given.get("counts"), str):
        yield (
            f"training.repair.counts is {given.get('counts')!r}; expected the path of a CSV file "
            "of published label counts"
        )


def _weight_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    if sections["weights"]:
        yield from _named_problems(WEIGHTS, sections["weights"], "weights", "kind")


TUNED = ("plan", "model", "training", "weights")
"""Sections whose keys may differ between the candidates of a search."""


def _tuning_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["tuning"]
    if not content:
        return
    if ("space" in content) == ("candidates" in content):
        yield "tuning needs either a space (values to combine) or a list of candidates"
    given = [content.get("space"), *_tables(content.get("candidates"))]
    keys = {key: None for one in given if isinstance(one, Mapping) for key in flat_keys(one)}
    for key in keys:
        section, _, rest = key.partition(".")
        if section not in TUNED or not rest:
            yield (
                f"tuning has {key!r}; expected keys such as training.lr, from the sections "
                f"{', '.join(TUNED)}"
            )
    if content.get("score", "paid") == "public":
        for key in ("score_std", "score_share"):
            if key in content:
                yield f"tuning.{key} with score = 'public': expected neither, as it costs nothing"
    if "separator" in sections["owners"]:
        yield "tuning with owners.separator: expected records with one owner each"


def _tables(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list) else []


def flat_keys(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys such as training.lr; TOML nests dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and "." not in name and key in SECTIONS:
            found |= flat_keys(value, f"{name}.")
        else:
            found[name] = value
    return found
