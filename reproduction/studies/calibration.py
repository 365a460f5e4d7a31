"""Repairs of the tilt that individual budgets leave: what they give the strict owners.

    python reproduction/studies/calibration.py digits
    python reproduction/studies/calibration.py cifar10

Settings on the data of `ownerwise demo`, ten owners, one per class, 1,078 training records, five
new splits by eight seeds: digits (epsilon 1 to 10); equal (all budgets 3: there is nothing to
repair); rare (class 0, the strictest, is 1% of the records); few (300 training records). Settings
on the features of EfficientNet-Lite0 at 112 pixels of CIFAR-10 (extracted once, which takes ten
minutes of one processor core, if OWNERWISE_CACHE names a folder; other features can be passed as an
.npz file with train_features, train_labels, test_features and test_labels), a linear head, three
seeds: cifar10 (ten owners, one per class, epsilon 0.5 to 5); animals (animals against vehicles; one
strict owner, epsilon 0.3, with all cats, frogs and ships, one lax owner, epsilon 5, with the rest).
Settings that were not used to choose anything: mnist (ten owners, one per class, epsilon 0.5 to 5,
784-64-10), ctg (three owners, one per class, the rarer the stricter: epsilon 0.5, 1 and 5), adult
(a strict owner, epsilon 0.3, with the records of all women, and a lax one, epsilon 5, with those of
all men; labels are mixed); ctg and adult with a linear model and five splits. Every method is tuned
over the same cells (clip norm, learning rate) on held-out training records, by overall accuracy;
calibrated plans pay for their release. The pull adjustment (tau 1) uses the counts of the training
labels as if they had been public. Runs have fixed seeds and are NOT PRIVATE: they show how private
runs would perform. Each setting is a file in reproduction/results/calibration; index.md is written
from them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import ownerwise as ow
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/calibration"
FIGURES = ("overall", "strict half", "strictest three", "worst group")
ANIMALS, STRICT = (2, 3, 4, 5, 6, 7), (3, 6, 8)  # classes of CIFAR-10
WOMEN = "Female"  # in Adult's column sex


@dataclass(frozen=True)
class Split:
    """Training, validation and test records of one split: inputs, labels and groups.

    Owners and figures follow the groups: the classes in the files, or the owners in `adult`.
    """

    train: tuple[Tensor, Tensor, np.ndarray]
    validation: tuple[Tensor, Tensor, np.ndarray]
    test: tuple[Tensor, Tensor, np.ndarray]


@dataclass(frozen=True)
class Setting:
    """What is trained, and the cells (clip norm, learning rate) that are searched.

    Attributes:
        budgets: epsilon of each group.
        owner_of: owner of each group.
        labels: label of each group; None if labels are mixed.
    """

    budgets: tuple[float, ...]
    steps: int
    batch_size: int
    hidden: tuple[int, ...]
    clip_norms: tuple[float, ...]
    step_lengths: tuple[float, ...]
    splits: int
    seeds: int
    search_seeds: int
    owner_of: tuple[int, ...] = tuple(range(10))
    labels: tuple[int, ...] | None = tuple(range(10))
    methods: tuple[str, ...] = (
        "DP-SGD", "IDP-SGD", "INO-SGD", "pull", "IDP-SGD calibrated", "IDP-SGD calibrated, pull",
    )  # fmt: skip

    @property
    def cells(self) -> list[tuple[float, float]]:
        return [(clip, length / clip) for clip in self.clip_norms for length in self.step_lengths]

    @property
    def order(self) -> list[int]:
        """The groups from the strictest to the laxest."""
        return sorted(range(len(self.budgets)), key=lambda group: self.budgets[group])

    @property
    def strict(self) -> int:
        """Number of groups in the strict half: those below the median budget, if any."""
        below = int((np.array(self.budgets) < np.median(self.budgets)).sum())
        return below or len(self.budgets) // 2

    @property
    def classes(self) -> int:
        return 2 if self.labels is None else len(set(self.labels))


def _evenly(low: float, high: float) -> tuple[float, ...]:
    return tuple(np.linspace(low, high, 10).tolist())


SCALE = ("IDP-SGD (scale)", "pull (scale)", "IDP-SGD (scale) calibrated")
DIGITS: dict[str, Any] = {
    "steps": 120,
    "batch_size": 128,
    "hidden": (64,),
    "clip_norms": (0.3, 1.0, 4.0),
    "step_lengths": (2.0, 4.0, 8.0),
    "splits": 5,
    "seeds": 8,
    "search_seeds": 2,
}
CIFAR: dict[str, Any] = {
    "steps": 150,
    "batch_size": 2500,
    "hidden": (),
    "clip_norms": (1.0, 4.0),
    "step_lengths": (2.0, 4.0, 8.0),
    "splits": 1,
    "seeds": 3,
    "search_seeds": 1,
}
SETTINGS = {
    "digits": Setting(_evenly(1, 10), **DIGITS),
    "digits, scale": Setting(_evenly(1, 10), **DIGITS, methods=SCALE),
    "equal": Setting((3.0,) * 10, **DIGITS),
    "rare": Setting(_evenly(1, 10), **DIGITS),
    "few": Setting(_evenly(1, 10), **DIGITS | {"batch_size": 64}),
    "cifar10": Setting(_evenly(0.5, 5), **CIFAR),
    "cifar10, scale, clip norm 1": Setting(
        _evenly(0.5, 5), **CIFAR | {"clip_norms": (1.0,)}, methods=SCALE
    ),
    "cifar10, scale, clip norm 4": Setting(
        _evenly(0.5, 5), **CIFAR | {"clip_norms": (4.0,)}, methods=SCALE
    ),
    "animals": Setting(
        tuple(0.3 if label in STRICT else 5.0 for label in range(10)),
        **CIFAR,
        owner_of=tuple(int(label not in STRICT) for label in range(10)),
        labels=tuple(int(label in ANIMALS) for label in range(10)),
    ),
    "mnist": Setting(_evenly(0.5, 5), **CIFAR | {"hidden": (64,), "batch_size": 1024}),
    "ctg": Setting(
        (5.0, 1.0, 0.5), **DIGITS | {"hidden": ()}, owner_of=(0, 1, 2), labels=(0, 1, 2)
    ),
    "adult": Setting(
        (0.3, 5.0),
        **DIGITS | {"hidden": (), "batch_size": 1024, "seeds": 3, "search_seeds": 1},
        owner_of=(0, 1),
        labels=None,
    ),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP-SGD": ("uniform", {}),
    "IDP-SGD": ("sample", {}),
    "INO-SGD": ("sample", {"weights": ow.INO()}),
    "IDP-SGD calibrated": ("sample", {"calibrated": True}),
    "IDP-SGD calibrated, pull": ("sample", {"calibrated": True, "pull": True}),
    "IDP-SGD (scale)": ("scale", {}),
    "IDP-SGD (scale) calibrated": ("scale", {"calibrated": True}),
    "IDP-SGD (scale) calibrated, pull": ("scale", {"calibrated": True, "pull": True}),
}
PULLED = {"pull": "IDP-SGD", "pull (scale)": "IDP-SGD (scale)"}


def splits_of(
    name: str, setting: Setting, features: Path | None = None, first: int = 1000
) -> list[Split]:
    """Return the splits of a setting; those of the digits and of tables have seeds from `first`."""
    if name in ("mnist", "ctg", "adult"):
        return _unseen(name, setting, first)
    if setting.hidden:
        return _digits(name, setting, first)
    stored = _cifar10_features() if features is None else np.load(features)
    labels = np.array(setting.labels)

    def part(inputs: np.ndarray, groups: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
        x = torch.from_numpy(inputs)
        return nn.functional.layer_norm(x, x.shape[1:]), torch.from_numpy(labels[groups]), groups

    inputs, groups = stored["train_features"], stored["train_labels"].astype(np.int64)
    order = np.random.default_rng(1000).permutation(len(inputs))
    held, train = order[:5000], order[5000:]
    test = stored["test_features"], stored["test_labels"].astype(np.int64)
    return [
        Split(part(inputs[train], groups[train]), part(inputs[held], groups[held]), part(*test))
    ]


def _cifar10_features() -> dict[str, np.ndarray]:
    extractor, data = ow.models.features.EfficientNetLite0(), ow.data.load("cifar10")
    assert data.test is not None
    found: dict[str, np.ndarray] = {}
    for name, part in (("train", data.train), ("test", data.test)):
        images, labels = part.tensors()
        found[f"{name}_features"] = ow.models.features.extract(extractor, images).numpy()
        found[f"{name}_labels"] = labels.numpy()
    return found


def _unseen(name: str, setting: Setting, first: int) -> list[Split]:
    data = ow.data.load(name)
    parts = [part for part in (data.train, data.test) if part is not None]
    x = torch.cat([part.tensors()[0] for part in parts]).float().flatten(1)
    y = torch.cat([part.tensors()[1] for part in parts]).long()
    groups = y.numpy()
    if name == "adult":
        sex = np.concatenate([part.columns["sex"] for part in parts])
        groups = (sex != WOMEN).astype(np.int64)
    found = []
    for split in range(setting.splits):
        order = np.random.default_rng(first + split).permutation(len(x))
        test, validation, train = np.split(order, [len(x) // 5, 2 * len(x) // 5])
        found.append(Split(*((x[at], y[at], groups[at]) for at in (train, validation, test))))
    return found


def _digits(name: str, setting: Setting, first: int) -> list[Split]:
    data = ow.data.load("digits")
    parts = [data.train, data.test]
    x = torch.cat([torch.from_numpy(part.inputs) for part in parts]).flatten(1)
    y = torch.cat([torch.from_numpy(part.targets) for part in parts])
    found = []
    for split in range(setting.splits):
        rng = np.random.default_rng(first + split)
        order = rng.permutation(len(x))
        test, validation, train = np.split(order, [len(x) // 5, 2 * len(x) // 5])
        if name == "few":
            train = train[:300]
        if name == "rare":
            zeros = y[torch.from_numpy(train)].numpy() == 0
            train = np.concatenate([train[~zeros], train[zeros][: round(0.01 * len(train))]])
        cut = (torch.from_numpy(at) for at in (train, validation, test))
        found.append(Split(*((x[at], y[at], y[at].numpy()) for at in cut)))
    return found


def figures(
    outputs: Callable[[Tensor], Tensor],
    data: tuple[Tensor, Tensor, np.ndarray],
    setting: Setting,
) -> list[float]:
    x, y, groups = data
    with torch.no_grad():
        right = (outputs(x).argmax(dim=1) == y).double().numpy()
    recalls = np.array([right[groups == group].mean() for group in setting.order])
    strict = recalls[: setting.strict]
    return [float(right.mean()), strict.mean(), strict[:3].mean(), recalls.min()]


class Study:
    def __init__(self, setting: Setting, splits: list[Split]):
        self.setting = setting
        self.splits = splits
        self.plans: dict[Any, ow.Plan] = {}

    def plan(self, split: int, method: str, clip: float) -> ow.Plan:
        kind, options = METHODS[method]
        calibrated = options.get("calibrated", False)
        pull = options.get("pull", False)
        key = split, kind, calibrated, pull, clip
        if key not in self.plans:
            setting = self.setting
            owner_of = np.array(setting.owner_of)
            budgets = {
                owner: setting.budgets[setting.owner_of.index(owner)]
                for owner in set(setting.owner_of)
            }
            owners = ow.Owners(owner_of[self.splits[split].train[2]], budgets, 1e-5)
            self.plans[key] = ow.plan(
                owners,
                kind,
                steps=setting.steps,
                batch_size=setting.batch_size,
                clip_norm=clip,
                calibration=self._calibration(pull) if calibrated else None,
            )
        return self.plans[key]

    def _calibration(self, pull: bool) -> ow.Calibration:
        return ow.Calibration(classes=self.setting.classes, pull=pull)

    def train(
        self, split: int, method: str, cell: tuple[float, float], seed: int
    ) -> tuple[nn.Module, ow.Run]:
        clip, lr = cell
        data, setting = self.splits[split], self.setting
        torch.manual_seed(seed)
        inputs, classes = data.train[0].shape[1], setting.classes
        if setting.hidden:
            model: nn.Module = ow.models.mlp(inputs, classes, hidden=setting.hidden)
        else:
            model = nn.Linear(inputs, classes)
            nn.init.zeros_(model.weight)
        run = ow.Trainer(
            model,
            self.plan(split, method, clip),
            lr=lr,
            weights=METHODS[method][1].get("weights"),
            seed=seed,
            evaluate_every=setting.steps,
            progress=False,
        ).fit(data.train[:2])
        return model, run

    def run(self, method: str) -> dict[str, Any]:
        """Return the chosen cells and the figures, [splits, seeds, figures], of a method."""
        setting, chosen = self.setting, []
        results: dict[str, list] = {"figures": [], "before": [], "pull": []}
        for split, data in enumerate(self.splits):
            best = self.best_cell(split, method)
            chosen.append(best)
            for found in results.values():
                found.append([])
            for seed in range(setting.seeds):
                model, run = self.train(split, method, best, seed)
                results["figures"][-1].append(figures(model, data.test, setting))
                for key, shift in self._shifts(split, method, run).items():
                    moved = figures(lambda x: model(x) + shift, data.test, setting)  # noqa: B023
                    results[key][-1].append(moved)
        return {"cells": chosen, **{key: found for key, found in results.items() if found[0]}}

    def best_cell(self, split: int, method: str) -> tuple[float, float]:
        """Return the cell with the best accuracy on validation records."""
        setting, validation = self.setting, self.splits[split].validation
        scores = {
            cell: np.mean(
                [
                    figures(self.train(split, method, cell, 900 + s)[0], validation, setting)[0]
                    for s in range(setting.search_seeds)
                ]
            )
            for cell in setting.cells
        }
        return max(scores, key=lambda cell: scores[cell])

    def _shifts(self, split: int, method: str, run: ow.Run) -> dict[str, Tensor]:
        """Return what to add to the outputs: to undo a calibration, or to adjust for the pull."""
        calibration = run.history[-1].get("calibration")
        if calibration is not None:
            return {"before": torch.tensor(calibration["shift"] or [0.0]).float()}
        if method not in PULLED.values():
            return {}
        _, labels, groups = self.splits[split].train
        owners = np.array(self.setting.owner_of)[groups]
        counts = np.zeros((len(set(self.setting.owner_of)), self.setting.classes))
        np.add.at(counts, (owners, labels.numpy()), 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"pull": -ow.PullAdjustment(tau=1.0, counts=counts).shift(run.plan).float()}


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Repairs after training",
        "",
        "`python reproduction/studies/calibration.py` writes this page; its first lines describe",
        "the settings. Percentages on test records; all runs have fixed seeds and are NOT PRIVATE.",
        "The last two columns compare overall accuracy and the strict half with the same method",
        "without repair: mean and 95% interval (Student's t) over splits, or over seeds with one",
        "split. Calibrated plans pay for their release, so the model trains with less; the row",
        "“before” is the same model without its shift.",
        "",
    ]
    for name, methods in results.items():
        lines += [
            f"## {name}", "",
            f"| | {' | '.join(FIGURES)} | gain overall | gain of the strict half |",
            f"|---{'|---' * 6}|",
        ]  # fmt: skip
        for label, values, plain in _rows(name, methods):
            cells = [f"{value:.1f}" for value in values.mean(axis=(0, 1))]
            gains = ["–", "–"] if plain is None else [gain(values, plain, at) for at in (0, 1)]
            lines.append(f"| {label} | {' | '.join([*cells, *gains])} |")
        lines.append("")
    return "\n".join(lines)


def _rows(name: str, methods: dict[str, Any]) -> Iterator[tuple[str, np.ndarray, Any]]:
    """Yield the label, the figures [splits, seeds, figures] and those of the plain method."""
    for method in SETTINGS[name].methods:
        source = PULLED.get(method, method)
        if source not in methods:
            continue
        entry = methods[source]
        base = source.removesuffix(", pull").removesuffix(" calibrated")
        base = "IDP-SGD" if method == "INO-SGD" else base
        plain = None
        if base in methods and base != method:
            plain = 100 * np.array(methods[base]["figures"])
        key = "pull" if method in PULLED else "figures"
        label = f"{source}, pull adjustment" if method in PULLED else method
        if "before" in entry:
            yield f"{label}: before", 100 * np.array(entry["before"]), plain
        yield label, 100 * np.array(entry[key]), plain


def gain(values: np.ndarray, plain: np.ndarray, at: int) -> str:
    """Return the mean gain of a figure and its 95% interval over splits, or over seeds of one."""
    change = (values - plain)[..., at]
    return interval(change.mean(axis=1) if len(change) > 1 else change[0])


def interval(change: np.ndarray) -> str:
    """Return the mean of the changes, with its 95% interval (Student's t)."""
    error = stats.t.ppf(0.975, len(change) - 1) * change.std(ddof=1) / np.sqrt(len(change))
    mean = change.mean()
    return f"{mean:+.1f} [{mean - error:.1f}, {mean + error:.1f}]"


def _path(setting: str) -> Path:
    return RESULTS / f"{setting.replace(',', '').replace(' ', '-')}.json"


def _stored(path: Path) -> dict[str, Any]:
    return read_json(path, mapping_of(ANYTHING))["methods"] if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--features", type=Path, help="other features of CIFAR-10")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = _path(options.setting)
    setting = SETTINGS[options.setting]
    study = Study(setting, splits_of(options.setting, setting, options.features))
    for method in study.setting.methods:
        results = _stored(path)
        if method in PULLED or method in results:
            continue
        results[method] = study.run(method)
        write_json(path, {"setting": options.setting, "methods": results}, indent=None)
        stored = {name: _stored(_path(name)) for name in SETTINGS if _path(name).exists()}
        write_text(RESULTS / "index.md", table(stored))
        print(table({options.setting: results}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
