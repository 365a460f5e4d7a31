"""Further releases after training, against plain calibration: what else can be measured and paid.

    python reproduction/studies/releases.py digits

Settings of `calibration.py` on five new splits (their seeds start at 3000; see below for the one
change that was made after results on them), trained with one of three plans: without calibration,
with plain calibration, and with calibration towards the pull (`Calibration(pull=True)`). Clip norms
and learning rates are those that `calibration.py` chose most often, on other splits, without and
with calibration. Each model is calibrated eight times, with new noise of the plan; figures are
means over these draws. Two rivals use models and plan of the third, and the same budget for their
own sums:

- paid pull adjustment: class totals of labels, and the same weighted by the owners' mu; tau is 1;
- tau alone: these two sums, and one of each record's slope and curvature of the log-likelihood in
  tau, with probabilities shifted by tau 1 times the log of their ratio; one Newton step.

Settings: digits (four seeds), digits with method scale, few, rare, equal, ctg (two seeds each);
"few, mixed" and "digits, mixed" (two): the ten owners have records of all digits at random, so
there is no tilt between classes. Every split has its own seeds, so that all noise is independent.
Groups are the classes; in the mixed settings, the owners.
What was decided beforehand: calibration towards the pull is kept if it raises the strict half over
plain calibration by an interval above 0 in at least one setting, lowers neither overall accuracy
nor the strict half by an interval below 0 in any, and does so by more than its rivals.
What came of it: the first condition is met; the second is not in "few, mixed", nor the third
against "tau alone" in few, so calibration towards the pull is an option and not the default. After
a first result for "few, mixed" (1.0 lower overall), a mild shrinkage of the measured direction was
added, with a constant chosen on splits with seeds from 2000; all figures are with this shrinkage.
Runs have fixed seeds and are NOT PRIVATE: they show how private runs would perform. Each setting
is a file in reproduction/results/releases; index.md is written from them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from calibration import (
    FIGURES,
    SETTINGS,
    Split,
    Study,
    figures,
    interval,
    splits_of,
)  # fmt: skip
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/releases"
FIRST = 3000
DRAWS = 8
CELLS = {
    "digits": ((1.0, 2.0), (1.0, 2.0)),
    "rare": ((1.0, 2.0), (1.0, 2.0)),
    "few": ((0.3, 20 / 3), (0.3, 20 / 3)),
    "equal": ((0.3, 20 / 3), (0.3, 20 / 3)),
    "ctg": ((4.0, 2.0), (0.3, 80 / 3)),
}
"""Clip norm and learning rate, without and with calibration."""
NAMES = (
    "digits", "few", "rare", "equal", "ctg", "digits, scale", "few, mixed", "digits, mixed",
)  # fmt: skip
LABELS = ("IDP-SGD", "calibrated", "calibrated, pull", "paid pull adjustment", "tau alone")


def study_of(name: str) -> Study:
    base, *rest = name.split(", ")
    setting = SETTINGS[base]
    setting = replace(setting, splits=5, seeds=4 if name == "digits" else 2)
    splits = splits_of(base, setting, first=FIRST)
    if rest == ["mixed"]:
        splits = [
            Split(*(_mixed(part, FIRST + at) for at, part in enumerate(parts)))
            for parts in ((s.train, s.validation, s.test) for s in splits)
        ]
    return Study(setting, splits)


def _mixed(part: tuple[Tensor, Tensor, np.ndarray], seed: int) -> Any:
    owners = np.random.default_rng(seed).permutation(np.arange(len(part[1])) % 10)
    return part[0], part[1], owners


def run(study: Study, base: str, kind: str) -> dict[str, Any]:
    """Return the figures, [splits, seeds, figures], of every label."""
    prefix = f"IDP-SGD{kind}"
    methods = (prefix, f"{prefix} calibrated", f"{prefix} calibrated, pull")
    found: dict[str, list] = {label: [] for label in LABELS}
    for split, data in enumerate(study.splits):
        for label, method in zip(LABELS, methods, strict=False):
            cell = CELLS[base][label != LABELS[0]]
            rows: dict[str, list] = {}
            for seed in range(100 * split, 100 * split + study.setting.seeds):
                model, result = study.train(split, method, cell, seed)
                if label == LABELS[0]:
                    rows.setdefault(label, []).append(figures(model, data.test, study.setting))
                    continue
                rivals = _rivals if label == LABELS[2] else {}
                for name, shift in {label: _calibration, **rivals}.items():
                    values = _after(study, data, model, result, seed, shift)
                    rows.setdefault(name, []).append(values)
            for name, values in rows.items():
                found[name].append(values)
    return found


@dataclass(frozen=True)
class Model:
    """What a release needs: the plan, and logits, labels and owners of the training records."""

    plan: ow.Plan
    logits: np.ndarray
    labels: np.ndarray
    owner: np.ndarray

    def noised(self, rows: np.ndarray, number: int, sums: int, rng: Any) -> np.ndarray:
        """Return sum `number` of `sums` that cost as much together as those of the plan."""
        plan = self.plan
        lengths = plan.closing_lengths(number)[self.owner, None]
        std = plan.closing_std * np.sqrt(sums / plan.closing_count)
        return (rows * lengths).sum(axis=0) + rng.normal(0, std, rows.shape[1])


Release = Callable[[Model, np.random.Generator], np.ndarray]


def _after(
    study: Study, data: Split, model: nn.Module, run: ow.Run, seed: int, release: Release
) -> list[float]:
    """Return the mean figures over draws of the release."""
    back = torch.tensor(run.history[-1]["calibration"]["shift"]).float()
    x, y, groups = data.train
    with torch.no_grad():
        logits = (model(x) + back).double().numpy()
    owner = np.array(study.setting.owner_of)[groups]
    released = Model(run.plan, logits, y.numpy(), owner)
    found = []
    for draw in range(DRAWS):
        shift = back - torch.from_numpy(release(released, np.random.default_rng((seed, draw))))
        found.append(figures(lambda x, by=shift: model(x) + by.float(), data.test, study.setting))
    return np.mean(found, axis=0).tolist()


def _calibration(model: Model, rng: np.random.Generator) -> np.ndarray:
    """Return the shift of the library's own calibration under the plan."""
    bound = ow.Calibration().bind(model.plan)
    logits, labels = torch.from_numpy(model.logits), torch.from_numpy(model.labels)
    for number in range(model.plan.closing_count):
        rows = bound.contributions(logits, labels).numpy()
        total = model.noised(rows, number, model.plan.closing_count, rng)
        bound.observe(torch.from_numpy(total))
    assert bound.shift is not None
    return bound.shift.numpy()


def _ratio(model: Model, sums: int, rng: np.random.Generator) -> np.ndarray:
    """Return the log ratio of weighted and plain class totals, floored at their noise."""
    one_hot = np.eye(model.logits.shape[1])[model.labels]
    std = model.plan.closing_std * np.sqrt(sums / model.plan.closing_count)
    if model.plan.closing_pulls is None:  # equal budgets
        return np.zeros(one_hot.shape[1])
    weighted, plain = (np.maximum(model.noised(one_hot, n, sums, rng), std) for n in (0, 1))
    return np.log(weighted / plain)


def _paid_pull(model: Model, rng: np.random.Generator) -> np.ndarray:
    return _ratio(model, 2, rng)


def _tau(model: Model, rng: np.random.Generator) -> np.ndarray:
    ratio = _ratio(model, 3, rng)
    tau = 1 + _newton(model, ratio, rng) if np.ptp(ratio) else 0.0
    return min(max(tau, 0.0), 2.0) * ratio


_rivals: dict[str, Release] = {LABELS[3]: _paid_pull, LABELS[4]: _tau}


def _newton(model: Model, ratio: np.ndarray, rng: np.random.Generator) -> float:
    """Return a Newton step in tau from 1, from one sum of vectors of length at most 1."""
    span = float(np.ptp(ratio))
    unit = (ratio - (ratio.max() + ratio.min()) / 2) / span  # slopes are within 1, curvatures 1/4
    shifted = model.logits - ratio
    odds = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    mean = odds @ unit
    slope, curvature = mean - unit[model.labels], odds @ unit**2 - mean**2
    rows = np.stack([0.8 * slope, 0.6 * 4 * curvature], axis=1)
    first, second = model.noised(rows, 1, 3, rng)
    least = model.plan.closing_std
    return float(first / 0.8 / (max(second, least) / 2.4) / span)


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Further releases after training",
        "",
        "`python reproduction/studies/releases.py` writes this page; its first lines describe the",
        "settings and what was decided beforehand. Percentages on test records; all runs have",
        "fixed seeds and are NOT PRIVATE. The last two columns compare with plain calibration:",
        "mean and 95% interval (Student's t) over splits. Every release is paid for.",
        "",
    ]
    for name, found in results.items():
        lines += [
            f"## {name}", "",
            f"| | {' | '.join(FIGURES)} | against calibrated, overall | strict half |",
            f"|---{'|---' * 6}|",
        ]  # fmt: skip
        plain = 100 * np.array(found["calibrated"])
        for label in LABELS:
            values = 100 * np.array(found[label])
            cells = [f"{value:.1f}" for value in values.mean(axis=(0, 1))]
            gains = ["–", "–"]
            if label != "calibrated":
                means = values.mean(axis=1), plain.mean(axis=1)
                gains = [interval((means[0] - means[1])[:, at]) for at in (0, 1)]
            lines.append(f"| {label} | {' | '.join([*cells, *gains])} |")
        lines.append("")
    return "\n".join(lines)


def _path(name: str) -> Path:
    return RESULTS / f"{name.replace(',', '').replace(' ', '-')}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setting", choices=NAMES, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.setting:
        kind = " (scale)" if name.endswith("scale") else ""
        found = run(study_of(name), name.split(", ")[0], kind)
        write_json(_path(name), {"setting": name, "figures": found}, indent=None)
        kept = mapping_of(ANYTHING)
        stored = {n: read_json(_path(n), kept)["figures"] for n in NAMES if _path(n).exists()}
        write_text(RESULTS / "index.md", table(stored))
        print(table({name: found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
