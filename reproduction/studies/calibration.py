"""Calibration after training: what it gives the owners with the strictest budgets.

    python reproduction/studies/calibration.py digits
    python reproduction/studies/calibration.py cifar10 --features features.npz

digits: the data of `ownerwise demo`, ten owners, one per class, epsilon 1 to 10; five new splits,
eight seeds each. cifar10: ten owners, one per class, epsilon 0.5 to 5; a linear head on fixed
features (an .npz file with train_features, train_labels, test_features and test_labels; see
`ownerwise.models.features`); three seeds. Every method is tuned over the same cells (clip norm,
learning rate) on held-out training records, by overall accuracy; calibrated plans account for their
release. Runs have fixed seeds and are NOT PRIVATE: they show how private runs would perform. Each
finished setting is an entry in reproduction/results/calibration/runs.json; index.md is written from
these entries.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/calibration"
FIGURES = ("overall", "strict half", "strictest three", "worst class")


@dataclass(frozen=True)
class Split:
    """Training, validation and test records of one split."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is trained, and the cells (clip norm, learning rate) that are searched."""

    budgets: tuple[float, float]
    steps: int
    batch_size: int
    hidden: tuple[int, ...]
    clip_norms: tuple[float, ...]
    step_lengths: tuple[float, ...]
    splits: int
    seeds: int
    search_seeds: int

    @property
    def cells(self) -> list[tuple[float, float]]:
        return [(clip, length / clip) for clip in self.clip_norms for length in self.step_lengths]


SETTINGS = {
    "digits": Setting((1.0, 10.0), 120, 128, (64,), (0.3, 1.0, 4.0), (2.0, 4.0, 8.0), 5, 8, 2),
    "cifar10": Setting((0.5, 5.0), 150, 2500, (), (1.0, 4.0), (2.0, 4.0, 8.0), 1, 3, 1),
}
METHODS = {
    "IDP-SGD": ("sample", False),
    "IDP-SGD calibrated": ("sample", True),
    "IDP-SGD (scale)": ("scale", False),
    "IDP-SGD (scale) calibrated": ("scale", True),
}


def splits_of(name: str, features: Path | None) -> list[Split]:
    if name == "digits":
        data = ow.data.load("digits")
        records = [data.train, data.test]
        x = torch.cat([torch.from_numpy(part.inputs) for part in records]).flatten(1)
        y = torch.cat([torch.from_numpy(part.targets) for part in records])
        found = []
        for split in range(SETTINGS[name].splits):
            order = np.random.default_rng(1000 + split).permutation(len(x))
            test, validation, train = np.split(order, [len(x) // 5, 2 * len(x) // 5])
            parts = (
                (x[torch.from_numpy(at)], y[torch.from_numpy(at)])
                for at in (train, validation, test)
            )
            found.append(Split(*parts))
        return found
    assert features is not None
    stored = np.load(features)
    pairs = {
        part: (
            torch.from_numpy(stored[f"{part}_features"]),
            torch.from_numpy(stored[f"{part}_labels"].astype(np.int64)),
        )
        for part in ("train", "test")
    }
    x, y = pairs["train"]
    x = nn.functional.layer_norm(x, x.shape[1:])
    test = pairs["test"][0]
    order = torch.from_numpy(np.random.default_rng(1000).permutation(len(x)))
    held, train = order[:5000], order[5000:]
    return [
        Split(
            (x[train], y[train]),
            (x[held], y[held]),
            (nn.functional.layer_norm(test, test.shape[1:]), pairs["test"][1]),
        )
    ]


def figures(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[float]:
    x, y = data
    with torch.no_grad():
        right = model(x).argmax(dim=1) == y
    recalls = np.array([float(right[y == label].double().mean()) for label in range(10)])
    return [float(right.double().mean()), recalls[:5].mean(), recalls[:3].mean(), recalls.min()]


class Study:
    def __init__(self, name: str, features: Path | None):
        self.setting = SETTINGS[name]
        self.splits = splits_of(name, features)
        self.plans: dict[Any, ow.Plan] = {}

    def plan(self, split: int, method: str, clip: float) -> ow.Plan:
        key = split, method, clip
        if key not in self.plans:
            setting, (kind, calibrated) = self.setting, METHODS[method]
            budgets = np.linspace(*setting.budgets, 10)
            owners = ow.Owners(self.splits[split].train[1].numpy(), dict(enumerate(budgets)), 1e-5)
            self.plans[key] = ow.plan(
                owners,
                kind,
                steps=setting.steps,
                batch_size=setting.batch_size,
                clip_norm=clip,
                calibration=ow.Calibration() if calibrated else None,
            )
        return self.plans[key]

    def train(self, split: int, method: str, cell: tuple[float, float], seed: int) -> nn.Module:
        clip, lr = cell
        data = self.splits[split]
        torch.manual_seed(seed)
        inputs = data.train[0].shape[1]
        if self.setting.hidden:
            model: nn.Module = ow.models.mlp(inputs, 10, hidden=self.setting.hidden)
        else:
            model = nn.Linear(inputs, 10)
            nn.init.zeros_(model.weight)
        steps = self.setting.steps
        ow.Trainer(
            model, self.plan(split, method, clip), lr=lr, seed=seed, evaluate_every=steps,
            progress=False,
        ).fit(data.train)  # fmt: skip
        return model

    def run(self, method: str) -> dict[str, Any]:
        setting, rows, chosen = self.setting, [], []
        for split, data in enumerate(self.splits):
            scores = {
                cell: np.mean(
                    [
                        figures(self.train(split, method, cell, 900 + s), data.validation)[0]
                        for s in range(setting.search_seeds)
                    ]
                )
                for cell in setting.cells
            }
            best = max(scores, key=lambda cell: scores[cell])
            chosen.append(best)
            rows.append(
                [
                    figures(self.train(split, method, best, seed), data.test)
                    for seed in range(setting.seeds)
                ]
            )
        return {"cells": chosen, "figures": np.array(rows).tolist()}


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Calibration after training",
        "",
        "`python reproduction/studies/calibration.py` writes this page. Percentages on test",
        "records; all runs have fixed seeds and are NOT PRIVATE. The last column compares the",
        "strict half with the same method without calibration: mean and 95% interval over splits",
        "(over seeds if there is one split).",
        "",
    ]
    for name, methods in results.items():
        lines += [f"## {name}", "", f"| | {' | '.join(FIGURES)} | gain |", f"|---{'|---' * 5}|"]
        for method, entry in methods.items():
            values = 100 * np.array(entry["figures"])  # [splits, seeds, figures]
            cells = [f"{value:.1f}" for value in values.mean(axis=(0, 1))]
            gain = "–"
            plain = method.removesuffix(" calibrated")
            if plain != method and plain in methods:
                other = 100 * np.array(methods[plain]["figures"])
                change = (values - other)[..., 1]
                change = change.mean(axis=1) if len(change) > 1 else change[0]
                error = 1.96 * change.std(ddof=1) / np.sqrt(len(change))
                mean = change.mean()
                gain = f"{mean:+.1f} [{mean - error:.1f}, {mean + error:.1f}]"
            lines.append(f"| {method} | {' | '.join(cells)} | {gain} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--features", type=Path, help="features for cifar10")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "runs.json"
    results = read_json(path, mapping_of(ANYTHING)) if path.exists() else {}
    study = Study(options.setting, options.features)
    for method in METHODS:
        if method in results.get(options.setting, {}):
            continue
        results.setdefault(options.setting, {})[method] = study.run(method)
        write_json(path, results, indent=None)
        write_text(RESULTS / "index.md", table(results))
        print(table({options.setting: results[options.setting]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
