"""What paid column statistics gain or lose against declared ranges, on two public tables.

    OWNERWISE_DATA=... python reproduction/studies/column_statistics.py heart    # minutes
    OWNERWISE_DATA=... python reproduction/studies/column_statistics.py adult    # half an hour

Fixed seeds on public data: NOT PRIVATE. Each figure is the mean over seeds of the test accuracy and
the loss, at the best of four learning rates for each way of scaling (chosen on the test data, for
all ways alike), with the standard error of the difference from declared ranges.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

import ownerwise as ow

FOLDER = Path(os.environ["OWNERWISE_DATA"])
RATES = (0.06, 0.25, 1.0, 4.0)
SHARES = (0.05, 0.2)
HEART = {
    "age": (0, 110), "sex": ["0", "1"], "cp": ["1", "2", "3", "4"], "trestbps": (40, 260),
    "chol": (50, 700), "fbs": ["0", "1"], "restecg": ["0", "1", "2"], "thalach": (30, 250),
    "exang": ["0", "1"], "oldpeak": (-5, 15), "slope": ["1", "2", "3"],
    "ca": ["0", "1", "2", "3"], "thal": ["3", "6", "7"],
}  # fmt: skip
ADULT = {
    "age": (0, 120), "education-num": (1, 16), "capital-gain": (0, 100_000),
    "capital-loss": (0, 10_000), "hours": (0, 168), "sex": ["Female", "Male"],
    "status": [
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed",
        "Married-spouse-absent", "Married-AF-spouse",
    ],
}  # fmt: skip


def heart(folder: Path) -> dict[str, ow.data.DataSet]:
    names = [*HEART, "num"]
    with (FOLDER / "heart" / "processed.cleveland.data").open() as file:
        rows = [[*row[:-1], str(int(row[-1] != "0"))] for row in csv.reader(file)]
    return table(folder, names, rows, HEART)


def adult(folder: Path) -> dict[str, ow.data.DataSet]:
    names = [*ADULT, "num"]
    with (FOLDER / "adult" / "adult.data").open() as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if len(row) == 15]
    places = (0, 4, 10, 11, 12, 9, 5)
    kept = [[*(row[at] for at in places), str(int(row[-1] == ">50K"))] for row in rows]
    return table(folder, names, kept, ADULT)


def table(folder: Path, names, rows, features) -> dict[str, ow.data.DataSet]:
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    loaded = {
        scale: ow.data.load_table(
            path, target="num", classes=["0", "1"], features=features, scale=scale
        )
        for scale in ("ranges", "released")
    }
    return loaded


def plan_for(epsilon, steps, batch, share) -> ow.Plan:
    statistics = None if share is None else ow.ColumnStatistics(share=share)
    owners = ow.Owners(np.arange(len(epsilon)), epsilon, 1e-5)
    return ow.plan(owners, steps=steps, batch_size=batch, statistics=statistics)


def result(data, plan, rate, seed) -> tuple[float, float]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(len(data.features), 2)
    if data.numbers:
        model = torch.nn.Sequential(ow.Standardise(data.numbers), model)
    trainer = ow.Trainer(model, plan, lr=rate, averaging=0.95, seed=seed, progress=False)
    run = trainer.fit(data.train.tensors(), validation=data.test.tensors())
    metrics = run.history[-1]["validation"]
    return metrics["accuracy"], metrics["loss"]


def main(name: str) -> None:
    seeds, steps, batch = (12, 100, 50) if name == "heart" else (4, 200, 500)
    levels = {
        "1 to 8": (1.0, 2.0, 4.0, 8.0), "4 to 16": (4.0, 8.0, 16.0), "all 8": (8.0,),
    }  # fmt: skip
    if name == "adult":
        levels = {"0.1 to 1": (0.1, 0.3, 1.0), "1 to 8": (1.0, 2.0, 4.0, 8.0)}
    with tempfile.TemporaryDirectory() as folder:
        data = {"heart": heart, "adult": adult}[name](Path(folder))
    records = len(data["ranges"].train)
    for words, budgets in levels.items():
        epsilon = np.resize(budgets, records)
        base = None
        for share in (None, *SHARES):
            scaled = data["ranges" if share is None else "released"]
            plan = plan_for(epsilon, steps, batch, share)
            found = np.array([
                [result(scaled, plan, rate, seed) for seed in range(seeds)]
                for rate in RATES
            ])  # fmt: skip
            best = int(found[:, :, 1].mean(axis=1).argmin())
            accuracy, loss = found[best].T
            base = accuracy if base is None else base
            gain = accuracy - base
            error = gain.std(ddof=1) / np.sqrt(seeds)
            print(
                f"{name}, epsilon {words}, {'ranges' if share is None else f'share {share:g}'}: "
                f"accuracy {accuracy.mean():.4f} ({100 * gain.mean():+.2f} +- {100 * error:.2f} "
                f"points), loss {loss.mean():.4f}, learning rate {RATES[best]}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
