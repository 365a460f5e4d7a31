"""A clip norm that adapts, against fixed ones: what it gains or loses, and what it costs.

    python reproduction/studies/clip_norms.py digits adult

Settings: digits (scikit-learn's digits, ten owners, one per class, epsilon 1 to 10, 64-64-10, 200
steps of 128 records), adult (census records, women with epsilon 0.5 and men with epsilon 4, 64
hidden units, 300 steps of 256 records). Method `sample`, plain clipping, SGD. Each fixed clip norm
and each adaptive one runs with every learning rate and with five splits of the data, each with its
own seed. The table gives the mean test accuracy over splits: with the learning rate that is best
for the row, and with the estimators' default of 0.5. Choosing the best learning rate and the best
fixed clip norm is not private and is not accounted for here, which favours the fixed ones. Runs
have fixed seeds and are NOT PRIVATE. Results are in reproduction/results/clip_norms.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from ownerwise.files import write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/clip_norms"
FIXED = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
ADAPTIVE = (
    *(ow.AdaptiveClipNorm(quantile) for quantile in (0.25, 0.5, 0.75, 0.9)),
    *(ow.AdaptiveClipNorm(quantile, first) for quantile in (0.5, 0.75) for first in (0.01, 100.0)),
)
LEARNING_RATES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
DEFAULT_RATE = 0.5
SPLITS = 5


def digits() -> tuple[Tensor, Tensor, np.ndarray, dict[Any, float]]:
    """Return inputs, labels, owners and budgets of the digits."""
    data = ow.data.load("digits")
    inputs, labels = data.train.tensors()
    held = data.test.tensors() if data.test is not None else (inputs[:0], labels[:0])
    inputs, labels = torch.cat([inputs, held[0]]).flatten(1), torch.cat([labels, held[1]])
    return inputs, labels, labels.numpy(), {digit: digit + 1.0 for digit in range(10)}


def adult() -> tuple[Tensor, Tensor, np.ndarray, dict[Any, float]]:
    """Return inputs, labels, owners and budgets of Adult's training file."""
    from ownerwise_reproduction.data.people import load_adult

    data = load_adult()
    inputs, labels = data.train.tensors()
    owners = data.train.columns["sex"]
    strict = {name: 0.5 if name == "Female" else 4.0 for name in np.unique(owners).tolist()}
    return inputs, labels, owners, strict


SETTINGS = {"digits": (digits, 200, 128), "adult": (adult, 300, 256)}


def study(name: str) -> dict[str, dict[str, Any]]:
    """Return the test accuracies of every row, by learning rate, and the last clip norm."""
    load, steps, batch_size = SETTINGS[name]
    inputs, labels, owners, budgets = load()
    rows: dict[str, dict[str, Any]] = {}
    for split in range(SPLITS):
        test = np.random.default_rng(split).random(len(inputs)) < 0.3
        held_out = torch.from_numpy(test)
        accounts = ow.Owners(owners[~test], budgets)
        for clip_norm in (*FIXED, *ADAPTIVE):
            plan = ow.plan(accounts, steps=steps, batch_size=batch_size, clip_norm=clip_norm)
            row = rows.setdefault(words(clip_norm), {"noise": [], "last": [], "accuracy": {}})
            row["noise"].append(plan.noise_std / plan.clip_norm)
            for rate in LEARNING_RATES:
                torch.manual_seed(split)
                model = nn.Sequential(
                    nn.Linear(inputs.shape[1], 64), nn.Tanh(), nn.Linear(64, int(labels.max()) + 1)
                )
                run = ow.Trainer(model, plan, lr=rate, seed=split, evaluate_every=steps).fit(
                    (inputs[~held_out], labels[~held_out]),
                    validation=(inputs[held_out], labels[held_out]),
                )
                last = run.history[-1]
                found = row["accuracy"].setdefault(f"{rate:g}", [])
                found.append(last["validation"]["accuracy"])
                if rate == DEFAULT_RATE and "steering" in last:
                    row["last"].append(last["steering"]["clip_norm"])
        print(name, "split", split, flush=True)
    return rows


def words(clip_norm: float | ow.AdaptiveClipNorm) -> str:
    """Return the name of a row."""
    if isinstance(clip_norm, float):
        return f"fixed {clip_norm:g}"
    return f"adaptive, quantile {clip_norm.quantile:g}, from {clip_norm.initial:g}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| clip norm | noise multiplier | test accuracy, best learning rate | with 0.5 | "
        "last clip norm |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        best = max(row["accuracy"], key=lambda rate: float(np.mean(row["accuracy"][rate])))
        cells = [
            f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"
            for values in (row["accuracy"][best], row["accuracy"][f"{DEFAULT_RATE:g}"])
        ]
        last = f"{min(row['last']):.2f} to {max(row['last']):.2f}" if row["last"] else ""
        noise = float(np.mean(row["noise"]))
        lines.append(f"| {name} | {noise:.3f} | {cells[0]} ({best}) | {cells[1]} | {last} |")
    return "\n".join(lines)


def main() -> None:
    """Run the settings named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", nargs="+", choices=SETTINGS)
    torch.set_num_threads(1)
    for name in parser.parse_args().settings:
        rows = study(name)
        RESULTS.mkdir(parents=True, exist_ok=True)
        write_json(RESULTS / f"{name}.json", rows)
        write_text(RESULTS / f"{name}.md", f"# {name}\n\n{table(rows)}\n")
        print(table(rows))


if __name__ == "__main__":
    main()
