"""Compare values of tail and kappa on the digits, each tuned in the same way.

    python reproduction/studies/tail_and_kappa.py      # about ten minutes

Each setting is a variant of `ownerwise demo`: ten owners, one per digit, with evenly spaced
budgets. Each choice of tail and kappa is tuned over the same clip norms and learning rates on
validation data, then run with new seeds; the results are measured on test data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ownerwise as ow
from ownerwise.cli.demo_comparison import Demo, DemoMethod, DemoSearch

RESULTS = Path(__file__).parents[1] / "results/tail-and-kappa/runs.json"
SETTINGS = {
    "budgets 0.5 to 5, 60 steps": (0.5, 5.0, DemoSearch(steps=60)),
    "budgets 1 to 10, 120 steps": (1.0, 10.0, DemoSearch()),
    "budgets 1 to 20, 120 steps": (1.0, 20.0, DemoSearch()),
    "budgets 3 to 6, 120 steps": (3.0, 6.0, DemoSearch()),
    "budgets 1 to 10, clip norm 0.03": (1.0, 10.0, DemoSearch(clip_norms=(0.03,))),
}


def choices() -> Iterator[DemoMethod]:
    yield DemoMethod("IDP-SGD", "sample")
    for tail in (0.4, 0.8):
        yield DemoMethod(f"tail {tail}", "sample", ow.INO(tail=tail))
        for kappa in (0.5, 1.0, 2.0):
            weights = ow.INO(tail=tail, score_by=ow.BudgetAware(kappa))
            yield DemoMethod(f"tail {tail}, kappa {kappa:g}", "sample", weights)


def measure(job: tuple[str, DemoMethod]) -> tuple[str, dict[str, Any]]:
    torch.set_num_threads(1)
    name, method = job
    low, high, search = SETTINGS[name]
    shown = Demo(search, [method], low, high)
    (runs,) = shown.compare(progress=False).values()
    (summary,) = shown.summaries({method.label: runs})
    pull = runs[0].plan.sampling_rates * runs[0].plan.clip_norms
    figures: dict[str, Any] = {k: [v.mean, v.deviation] for k, v in summary.figures.items()}
    figures |= {"clip_norm": summary.clip_norm, "lr": summary.lr, "seeds": len(runs)}
    return name, {"label": method.label, "pull_ratio": float(pull.max() / pull.min()), **figures}


def table(rows: list[dict[str, Any]]) -> str:
    names = ("overall", "strictest three", "worst owner", "spread")
    lines = ["| | " + " | ".join(names) + " | clip norm, lr |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        error = np.sqrt(row["seeds"])
        cells = [f"{row[n][0]:.3f} ± {row[n][1] / error:.3f}" for n in names]
        chosen = f"{row['clip_norm']:g}, {row['lr']:g}"
        lines.append(f"| {row['label']} | " + " | ".join(cells) + f" | {chosen} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", default=RESULTS)
    arguments = parser.parse_args()
    jobs = [(name, method) for name in SETTINGS for method in choices()]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    with ProcessPoolExecutor(2) as pool:
        for name, row in pool.map(measure, jobs):
            results[name].append(row)
            print(name, row["label"], row["overall"][0], row["strictest three"][0], flush=True)
    for name, rows in results.items():
        print(f"\n{name}; pull of the laxest owner {rows[0]['pull_ratio']:.1f} times the strictest")
        print(table(rows))
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
