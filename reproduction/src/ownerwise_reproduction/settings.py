"""The papers' settings, each in a TOML file with a configuration for `ownerwise train`.

The sections `data`, `owners`, `plan`, `model`, `training` and `weights` form the configuration;
INO-SGD uses `weights`, and other methods leave it out. The section `[experiment]` states where the
setting comes from, which values we chose because the paper does not state them, and how the short
profile differs from the paper.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ownerwise.config.reading import Config, make_config
from ownerwise.data.assign import ASSIGNMENTS, evenly
from ownerwise.errors import OwnerwiseError, known_names, name_some

PROFILES = ("paper", "short")
EVALUATIONS = 50
"""Default number of evaluations per run, which is enough to draw curves."""

_HEADING = {
    "title": str,
    "source": str,
    "choices": list,
    "short": list,
    "evaluations": int,
    "label_noise": float,
    "plain_lr": float,
}


@dataclass(frozen=True)
class Setting:
    """A setting, as read from its file.

    Attributes:
        name: name of the setting, such as MN-PC.
        title: description in words.
        source: the paper, and where in the paper the setting appears.
        choices: the values that we chose because the paper does not state them.
        short: changes that the short profile makes, in the form "section.key=value".
        evaluations: approximate number of evaluations per run.
        label_noise: fraction of training labels to replace.
        plain_lr: learning rate of the non-private method.
        sections: the sections of the configuration.
    """

    name: str
    title: str
    source: str
    choices: tuple[str, ...]
    short: tuple[str, ...]
    evaluations: int
    label_noise: float
    plain_lr: float
    sections: Mapping[str, Mapping[str, Any]]

    def configure(self, seed: int, profile: str = "paper", changes: Sequence[str] = ()) -> Config:
        """Return the configuration of one run.

        Random owners are drawn again for every seed, so the variation over seeds includes this
        draw.

        Args:
            seed: seed for noise, batches, initial weights and random owners. A fixed seed makes the
                run repeatable and NOT PRIVATE.
            profile: "paper", or "short" for fewer steps.
            changes: strings of the form "section.key=value", applied after the profile's changes.
        """
        if profile not in PROFILES:
            raise OwnerwiseError(f"profile {profile!r}: expected one of {', '.join(PROFILES)}")
        sections: dict[str, Any] = deepcopy(dict(self.sections))
        assignment = sections["owners"]["assignment"]
        if "seed" in ASSIGNMENTS.options(assignment["kind"]):
            assignment["seed"] = seed
        sections.setdefault("run", {})["seed"] = seed
        wanted = [*(self.short if profile == "short" else ()), *changes]
        config = make_config(sections, name=self.name, changes=wanted)
        if "evaluate_every" in config["run"]:
            return config
        every = max(1, config["plan"]["steps"] // self.evaluations)
        return make_config(config.sections, name=self.name, changes=[f"run.evaluate_every={every}"])


def names() -> list[str]:
    """Return the names of all settings."""
    return sorted(_files())


def setting(name: str) -> Setting:
    """Return a setting by its name, which is not case-sensitive."""
    known = {key.lower(): key for key in _files()}
    if name.lower() not in known:
        raise OwnerwiseError(f"no setting {name!r}; {known_names(name, names())}")
    key = known[name.lower()]
    return make_setting(key, _files()[key])


def make_setting(name: str, text: str) -> Setting:
    """Read a setting from the text of a TOML file, or raise an error that lists all problems."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OwnerwiseError(f"setting {name} is not valid TOML: {error}") from None
    heading = found.pop("experiment", {})
    problems = [f"setting {name}: {problem}" for problem in _heading_problems(heading)]
    assignment = found.get("owners", {}).get("assignment", {})
    if "evenly" in assignment:
        assignment["budgets"] = list(evenly(*assignment.pop("evenly")))
    if problems:
        raise OwnerwiseError(problems)
    made = Setting(
        name=name,
        title=heading["title"],
        source=heading["source"],
        choices=tuple(heading.get("choices", ())),
        short=tuple(heading.get("short", ())),
        evaluations=heading.get("evaluations", EVALUATIONS),
        label_noise=heading.get("label_noise", 0.0),
        plain_lr=heading.get("plain_lr", 0.1),
        sections=found,
    )
    for profile in PROFILES:
        made.configure(0, profile)
    return made


def _heading_problems(heading: Mapping[str, Any]) -> Iterator[str]:
    unknown = [key for key in heading if key not in _HEADING]
    if unknown:
        yield f"experiment.{name_some(unknown)}: expected {', '.join(_HEADING)}"
    for key in ("title", "source"):
        if key not in heading:
            yield f"experiment.{key} is missing"
    for key, kind in _HEADING.items():
        if key in heading and not isinstance(heading[key], kind):
            yield f"experiment.{key} is {heading[key]!r}; expected a {kind.__name__}"


@cache
def _files() -> dict[str, str]:
    folder = files("ownerwise_reproduction") / "catalogue"
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }
