"""Configuration files for `ownerwise train`: every key is checked, and all problems are listed."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.config.sections import ASSIGNMENT_KEYS, CLIPPING, SECTIONS
from ownerwise.config.values import ValueRule
from ownerwise.data import ASSIGNMENTS, LOADERS, loader_options
from ownerwise.errors import OwnerwiseError, known_names
from ownerwise.mechanisms import ORDERS, Steps
from ownerwise.models import BUILDERS
from ownerwise.models.features import EXTRACTORS
from ownerwise.planning import PlanRequest
from ownerwise.training import schedule_problems

_ANYTHING = ValueRule("a value", lambda value: True)
_OF_TABLES = ("target", "owner", "features", "classes", "columns", "scale", "test_share")


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
    for section, keys in SECTIONS.items():
        if section != "model":
            problems += _key_problems(section, sections[section], keys)
    for check in (
        _data_problems,
        _owner_problems,
        _plan_problems,
        _model_problems,
        _training_problems,
        _weight_problems,
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
            yield f"{where}.{key} is {value!r}; expected {keys[key].expected}"


def _fits(section: str, key: str, value: Any) -> bool:
    return SECTIONS[section][key].fits(value)


def _data_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["data"]
    extractor = content.get("extractor")
    if isinstance(extractor, Mapping) and extractor.get("name") not in EXTRACTORS:
        given = extractor.get("name")
        yield f"data.extractor.name {given!r} is unknown; {known_names(given, EXTRACTORS)}"
    if ("name" in content) == ("file" in content):
        yield "data needs either a name (a known data set) or a file (your own table)"
        return
    if "file" in content:
        if "target" not in content:
            yield "data.target is missing; expected the column with the class of each record"
        if "options" in content:
            yield (
                "data.options applies only to a named data set; for a file, set keys such as "
                "data.features"
            )
        return
    for key in _OF_TABLES:
        if key in content:
            yield f"data.{key} applies only to a file; for a named data set, use data.options"
    name, options = content["name"], content.get("options", {})
    if name not in LOADERS:
        yield f"data.name {name!r} is unknown; {known_names(name, LOADERS)}"
    elif isinstance(options, Mapping):
        known = loader_options(name)
        for option in options:
            if option not in known:
                yield f"{name} has no option data.options.{option}; {known_names(option, known)}"


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
        for key in ("column", "levels"):
            if key in content:
                yield f"owners.{key} applies only to budgets or epsilon, not to an assignment"
        if isinstance(content["assignment"], Mapping):
            yield from _assignment_problems(content["assignment"])
    elif "column" not in content and "owner" not in sections["data"]:
        yield (
            "the owner of each record is missing; expected data.owner (a column of the file) or "
            "owners.column (a column of the data set)"
        )


def _assignment_problems(content: Mapping[str, Any]) -> Iterator[str]:
    kind = str(content.get("kind"))
    if kind not in ASSIGNMENTS:
        yield f"owners.assignment.kind is {content.get('kind')!r}; {known_names(kind, ASSIGNMENTS)}"
        return
    options = assignment_options(kind)
    keys = {key: ASSIGNMENT_KEYS.get(key, _ANYTHING) for key in ("kind", *options)}
    yield from _key_problems("owners.assignment", content, keys)
    for key, needed in options.items():
        if needed and key not in content:
            yield f"owners.assignment.{key} is missing; expected {keys[key].expected}"


def assignment_options(kind: str) -> dict[str, bool]:
    """Return the options that an assignment takes, and whether each is required."""
    _, *options = inspect.signature(ASSIGNMENTS[kind]).parameters.values()
    return {option.name: option.default is option.empty for option in options}


def _plan_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = {key: value for key, value in sections["plan"].items() if key in SECTIONS["plan"]}
    for text in PlanRequest(**content).problems():
        key = text.split()[0]
        if key not in content:
            yield f"plan: {text}"
        elif _fits("plan", key, content[key]):  # otherwise, the rule of the key reports it
            yield f"plan.{text}"


def _model_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    options = dict(sections["model"])
    if "name" not in options:
        yield f"model.name is missing; expected one of {', '.join(BUILDERS)}"
        return
    name = str(options.pop("name"))
    if name not in BUILDERS:
        yield f"model.name is {name!r}; {known_names(name, BUILDERS)}"
        return
    known = model_options(name)
    for option in options:
        if option not in known:
            yield f"{name} has no option model.{option}; {known_names(option, known)}"


def model_options(name: str) -> list[str]:
    """Return the options that a model takes."""
    return [*inspect.signature(BUILDERS[name]).parameters]


def _training_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["training"]
    if "lr" not in content:
        yield f"training.lr is missing; expected {SECTIONS['training']['lr'].expected}"
    optimizer = content.get("optimizer", "sgd")
    if "momentum" in content and optimizer not in ("sgd", "rmsprop"):
        yield f"training.momentum applies only to sgd and rmsprop, not to {optimizer}"
    schedule, steps = content.get("schedule", "constant"), sections["plan"].get("steps", 10**9)
    if _fits("training", "schedule", schedule) and _fits("plan", "steps", steps):
        yield from (f"training.schedule: {text}" for text in schedule_problems(schedule, steps))
    clipping = content.get("clipping")
    if isinstance(clipping, Mapping):
        options = {key: value for key, value in clipping.items() if key != "kind"}
        kind = str(clipping.get("kind"))
        if kind not in CLIPPING:
            yield f"training.clipping.kind is {kind!r}; {known_names(kind, CLIPPING)}"
        else:
            yield from _key_problems("training.clipping", options, CLIPPING[kind])


def _weight_problems(sections: Mapping[str, Any]) -> Iterator[str]:
    content = sections["weights"]
    if content and "kind" not in content:
        yield f"weights.kind is missing; expected {SECTIONS['weights']['kind'].expected}"
    if "tail" in content and "tail_length" in content:
        yield "weights has both tail (a fraction) and tail_length (absolute); expected one of them"
    order = str(content.get("order", "loss"))
    if order not in ORDERS:
        yield f"weights.order is {order!r}; {known_names(order, ORDERS)}"
    if content.get("kappa") and order != "loss":
        yield 'weights.kappa applies only to weights.order = "loss"'
    shape = content.get("shape", "beta")
    if shape != "beta" and ("alpha" in content or "beta" in content):
        yield 'weights.alpha and weights.beta apply only to weights.shape = "beta"'
    if isinstance(shape, list) and SECTIONS["weights"]["shape"].fits(shape):
        try:
            Steps(shape)
        except ValueError as error:
            yield f"weights.shape: {error}"
