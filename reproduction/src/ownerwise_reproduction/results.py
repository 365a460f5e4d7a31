"""Results on disk: one JSON file per run, identified by a hash of its inputs.

The hash covers the setting's values with all changes, the method, the seed and the files of the
data set (names and sizes). A run that already has a result is not repeated. The hash does not cover
how the values were requested (by a profile or by equivalent changes), the contents of the data
files, or the code, including torch. `FORMAT` is incremented when a code change alters the meaning
of results; each result records the versions that produced it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.files import write_json
from ownerwise_reproduction import methods, settings
from ownerwise_reproduction.data import SOURCES
from ownerwise_reproduction.data.sources import locate
from ownerwise_reproduction.trials import Trial

FORMAT = 1
"""This number is part of every hash; it is incremented when the meaning of a result changes."""


def data_files(name: str, data_dir: str | PathLike | None = None) -> dict[str, Any]:
    """Return the files of a data set with their sizes, or raise an error if files are missing.

    A data set that comes with a package is identified by the package's version.
    """
    if name == "digits":
        return {"scikit-learn": version("scikit-learn")}
    found = {}
    for path in locate(SOURCES[name], data_dir):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                found[file.relative_to(path.parent).as_posix()] = file.stat().st_size
    return found


def made_from(trial: Trial) -> dict[str, Any]:
    """Return the inputs of a trial that are stored in its result: all except the data files."""
    config = trial.config
    return {
        "format": FORMAT,
        "setting": trial.setting.name,
        "method": trial.method.slug,
        "seed": trial.seed,
        "config": {name: dict(config[name]) for name in config.sections if name != "tuning"},
        "label_noise": trial.setting.label_noise,
        "plain_lr": None if trial.method.private else trial.setting.plain_lr,
    }


def trial_hash(trial: Trial, data_dir: str | PathLike | None = None) -> str:
    """Return the hash that identifies a trial's result."""
    content = made_from(trial)
    content["data"] = data_files(content["config"]["data"]["name"], data_dir)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_current(result: Mapping[str, Any]) -> bool:
    """Return True if the run would still use the same values if it were repeated now.

    Results in format 1 may lack the format, the label noise and the learning rate of plain SGD.
    """
    try:
        (method,) = methods.parse(result["spec"])
        trial = Trial(
            settings.setting(result["setting"]),
            method,
            result["seed"],
            result["profile"],
            tuple(result["changes"]),
        )
        today = made_from(trial)
    except OwnerwiseError:
        return False
    return today == {key: result.get(key, value) for key, value in (today | {"format": 1}).items()}


class Store:
    """The results in a folder: SETTING/METHOD/seed-3-HASH.json, next to unfinished runs.

    Args:
        folder: the folder, created when the first result is written.
    """

    def __init__(self, folder: str | PathLike):
        self.folder = Path(folder)

    def path(self, trial: Trial, content: str) -> Path:
        """Return the path of a result; its run folder has the same name without the suffix."""
        name = f"seed-{trial.seed}-{content[:12]}.json"
        return self.folder / trial.setting.name / trial.method.slug / name

    def write(self, path: Path, result: dict[str, Any]) -> None:
        """Write a result atomically."""
        write_json(path, result, indent=None)

    def read(self) -> list[dict[str, Any]]:
        """Return all results, ordered by setting, method and seed."""
        if not self.folder.is_dir():
            raise OwnerwiseError(f"no results in {self.folder}; run `ownerwise experiments run`")
        paths = sorted(self.folder.glob("*/*/seed-*.json"))
        found = [self.read_one(path) for path in paths]
        return sorted(found, key=lambda one: (one["setting"], one["method"], one["seed"]))

    def read_one(self, path: Path) -> dict[str, Any]:
        """Return a result."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise OwnerwiseError(
                f"{path} is corrupted: delete it and run its experiment again"
            ) from None
