"""Further releases after training, against plain calibration: what else can be measured and paid.

    python reproduction/studies/releases.py digits

Every setting of `calibration.py` named below, on new splits (five; their seeds start at 3000, and
nothing was chosen on them), trained with one of three plans: without calibration, with plain
calibration, and with calibration towards the pull (`Calibration(pull=True)`). Each is tuned over
the same three cells, by overall accuracy on held-out training records. Two rivals use models and
plan of the third, before its shift, and the same budget for their own sums:

- paid pull adjustment: class totals of labels, and the same weighted by the owners' mu; tau is 1;
- tau alone: these two sums, and one of each record's slope and curvature of the log-likelihood in
  tau, with probabilities shifted by tau 1 times the log of their ratio; one Newton step.

Settings: digits and few (eight seeds), digits with method scale, rare, equal, ctg (four each);
"few, mixed" and "digits, mixed" (four): the ten owners have records of all digits at random, so
there is no tilt between classes. Every split has its own seeds, so that all noise is independent. Groups are
the classes; in the mixed settings, the owners.
What was decided beforehand: calibration towards the pull is kept if it raises the strict half over
plain calibration by an interval above 0 in at least one setting, lowers neither overall accuracy
nor the strict half by an interval below 0 in any, and does so by more than its rivals.
Runs have fixed seeds and are NOT PRIVATE: they show how private runs would perform. Each setting
is a file in reproduction/results/releases; index.md is written from them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ownerwise as ow
from calibration import (
    FIGURES,
    SETTINGS,
    Split,
    Study,
    figures,
    gain,
    splits_of,
)  # fmt: skip
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/releases"
FIRST = 3000
CELLS = {
    "digits": ((0.3, 4.0), (1.0, 2.0), (4.0, 2.0)),
    "few": ((0.3, 2.0), (0.3, 4.0), (1.0, 2.0)),
    "equal": ((0.3, 2.0), (0.3, 4.0), (1.0, 2.0)),
    "ctg": ((0.3, 8.0), (1.0, 4.0), (4.0, 8.0)),
}
"""Clip norms and step lengths: those that were chosen most often in `calibration.py`."""
NAMES = (
    "digits", "few", "rare", "equal", "ctg", "digits, scale", "few, mixed", "digits, mixed",
)  # fmt: skip
LABELS = ("IDP-SGD", "calibrated", "calibrated, pull", "paid pull adjustment", "tau alone")


def study_of(name: str) -> Study:
    base, *rest = name.split(", ")
    setting = SETTINGS[base]
    chosen = CELLS.get(base, CELLS["digits"])
    setting = replace(
        setting,
        splits=5,
        seeds=8 if name in ("digits", "few") else 4,
        search_seeds=1,
        listed=tuple((clip, length / clip) for clip, length in chosen),
    )
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


def run(study: Study, kind: str) -> dict[str, Any]:
    """Return the figures, [splits, seeds, figures], of every label."""
    prefix = f"IDP-SGD{kind}"
    methods = (prefix, f"{prefix} calibrated", f"{prefix} calibrated, pull")
    found: dict[str, list] = {label: [] for label in LABELS}
    for split, data in enumerate(study.splits):
        for label, method in zip(LABELS, methods, strict=False):
            cell = study.best_cell(split, method)
            rows: dict[str, list] = {}
            for seed in range(100 * split, 100 * split + study.setting.seeds):
                model, result = study.train(split, method, cell, seed)
                rows.setdefault(label, []).append(figures(model, data.test, study.setting))
                if label == LABELS[2]:
                    for rival, values in _rivals(study, data, model, result, seed):
                        rows.setdefault(rival, []).append(values)
            for name, values in rows.items():
                found[name].append(values)
    return found


def _rivals(
    study: Study, data: Split, model: Any, run: ow.Run, seed: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield the figures of the releases that were not kept, on the model before its shift."""
    plan, shift = run.plan, torch.tensor(run.history[-1]["calibration"]["shift"])
    x, y, groups = data.train
    with torch.no_grad():
        logits = (model(x) + shift.float()).double().numpy()
    one_hot = np.eye(study.setting.classes)[y.numpy()]
    owner = np.array(study.setting.owner_of)[groups]
    shares = plan.closing_lengths(1)[owner, None]
    weighted = plan.closing_lengths(0)[owner, None]
    for name, sums in ((LABELS[3], 2), (LABELS[4], 3)):
        rng = np.random.default_rng(seed)
        std = plan.closing_std * np.sqrt(sums / plan.closing_count)
        if plan.closing_pulls is None:  # equal budgets: nothing to adjust
            yield name, figures(lambda x: model(x) + shift.float(), data.test, study.setting)
            continue

        def noised(rows: np.ndarray, rng=rng, std=std) -> np.ndarray:
            return np.maximum(rows.sum(axis=0) + rng.normal(0, std, rows.shape[1]), std)

        ratio = np.log(noised(weighted * one_hot) / noised(shares * one_hot))
        tau = 1.0
        if name == LABELS[4]:
            tau += _newton(logits, y.numpy(), ratio, shares, std, rng)
        moved = shift - torch.from_numpy(min(max(tau, 0.0), 2.0) * ratio)
        yield name, figures(lambda x: model(x) + moved.float(), data.test, study.setting)  # noqa: B023


def _newton(
    logits: np.ndarray,
    labels: np.ndarray,
    ratio: np.ndarray,
    shares: np.ndarray,
    std: float,
    rng: np.random.Generator,
) -> float:
    """Return a Newton step in tau from 1, from one sum of vectors of length at most the shares."""
    span = max(float(np.ptp(ratio)), 1e-6)
    unit = (ratio - (ratio.max() + ratio.min()) / 2) / span  # slopes are within 1, curvatures 1/4
    shifted = logits - ratio
    odds = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    mean = odds @ unit
    slope, curvature = mean - unit[labels], odds @ unit**2 - mean**2
    rows = shares * np.stack([0.8 * slope, 0.6 * 4 * curvature], axis=1)
    first, second = rows.sum(axis=0) + rng.normal(0, std, 2)
    return float(first / 0.8 / (max(second, std) / 2.4) / span)


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
                gains = [gain((means[0] - means[1])[:, at]) for at in (0, 1)]
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
        found = run(study_of(name), " (scale)" if name.endswith("scale") else "")
        write_json(_path(name), {"setting": name, "figures": found}, indent=None)
        kept = mapping_of(ANYTHING)
        stored = {n: read_json(_path(n), kept)["figures"] for n in NAMES if _path(n).exists()}
        write_text(RESULTS / "index.md", table(stored))
        print(table({name: found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
