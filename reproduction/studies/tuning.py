"""Private tuning within the budgets, against tuning for free and against no tuning.

    python reproduction/studies/tuning.py adult
    python reproduction/studies/tuning.py mnist
    python reproduction/studies/tuning.py digits
    python reproduction/studies/tuning.py table

Owners are single records with budgets of 1, 2 and 3 (34, 43 and 23 in 100 at random, delta 1e-5).
Candidates: four learning rates times three clip norms, fixed beforehand; `adult` trains logistic
regression, `mnist` a linear layer on pixels averaged over two by two, `digits` (a small table of
pixels) a linear layer. Rows:

- "first guess": the candidate in the middle of the grid, at the full budgets, nothing tuned;
- "tuned for free": all candidates trained at the full budgets, the best on the validation records
  kept; what papers report, and NOT private, because the choice is not paid for;
- "tuned within the budget": `ow.tune` with ten expected runs, chosen on the same validation records
  as public ones, for each law; and "paid score" with geometric law and a noised count.

What was decided beforehand: settings as above, five seeds, accuracy on the test records; a row
differs from another if the interval of the paired difference over seeds excludes 0 (95 %, t).
Fixed seeds make all results NOT PRIVATE.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text

RESULTS = Path(__file__).parents[1] / "results/tuning"
SEEDS = range(5)
BUDGETS, SHARES = (1.0, 2.0, 3.0), (0.34, 0.43, 0.23)
RATES = (0.1, 0.5, 2.0, 8.0)
CLIPS = (0.1, 0.5, 2.0)
PLANS = {
    "adult": {"steps": 300, "batch_size": 1000},
    "mnist": {"steps": 300, "batch_size": 2000},
    "digits": {"steps": 80, "batch_size": 300},
}
RUNS = 10
LAWS = ("logarithmic", "geometric", "poisson")


def data(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return training, validation and test records."""
    loaded = ow.data.load(name)
    inputs, targets = _tensors(name, loaded.train)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(inputs)))
    held = len(inputs) // 6
    return {
        "train": (inputs[order[held:]], targets[order[held:]]),
        "validation": (inputs[order[:held]], targets[order[:held]]),
        "test": _tensors(name, loaded.test),
    }


def _tensors(name: str, records: Any) -> tuple[Tensor, Tensor]:
    inputs = torch.from_numpy(np.asarray(records.inputs)).float()
    if name == "mnist":
        inputs = functional.avg_pool2d(inputs.reshape(-1, 1, 28, 28), 2)
    return inputs.flatten(1), torch.from_numpy(np.asarray(records.targets)).long()


def budgets(seed: int, records: int) -> np.ndarray:
    """Return the budget of every record."""
    return np.random.default_rng(seed).choice(BUDGETS, records, p=SHARES)


def accuracy(model: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    """Return the share of correct predictions."""
    with torch.no_grad():
        return float((model(pair[0]).argmax(1) == pair[1]).float().mean())


def one_seed(name: str, seed: int) -> dict[str, float]:
    """Return the test accuracy of every row for one seed."""
    parts = data(name)
    owners = ow.Owners(None, budgets(seed, len(parts["train"][1])))
    classes = int(parts["train"][1].max()) + 1
    model = nn.Linear(parts["train"][0].shape[1], classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    space = {"lr": list(RATES), "clip_norm": list(CLIPS)}
    result = {}
    scores: dict[tuple[float, float], tuple[float, float]] = {}
    for clip in CLIPS:
        plan = ow.plan(owners, clip_norm=clip, **PLANS[name])
        for lr in RATES:
            trained = copy.deepcopy(model)
            ow.Trainer(trained, plan, lr=lr, seed=seed, progress=False).fit(parts["train"])
            scores[lr, clip] = tuple(accuracy(trained, parts[p]) for p in ("validation", "test"))
    result["first guess"] = scores[RATES[1], CLIPS[1]][1]
    result["tuned for free"] = max(scores.values())[1]
    common = {"model": model, "runs": RUNS, "seed": seed, **PLANS[name]}
    for law in LAWS:
        run = ow.tune(
            space, owners, parts["train"], law=law,
            score=ow.PublicScore(parts["validation"]), **common,
        )  # fmt: skip
        result[f"within the budget, {law}"] = accuracy(run.model, parts["test"])
    others = ow.Owners(
        1_000_000 + np.arange(len(parts["validation"][1])),
        dict(
            zip(
                (1_000_000 + np.arange(len(parts["validation"][1]))).tolist(),
                budgets(100 + seed, len(parts["validation"][1])).tolist(),
                strict=True,
            )
        ),
    )
    run = ow.tune(
        space, owners, parts["train"], law="geometric",
        score=ow.PaidScore(parts["validation"], others, share=0.005), **common,
    )  # fmt: skip
    result["within the budget, geometric, paid score"] = accuracy(run.model, parts["test"])
    return result


def table() -> None:
    """Write the index from the stored results."""
    lines = [
        "# Private tuning\n",
        "Test accuracy in percent, mean and standard deviation over five seeds, and the paired",
        'difference from "tuned for free" with its 95 % interval. See `studies/tuning.py`.\n',
    ]
    for path in sorted(RESULTS.glob("*.json")):
        stored = read_json(path, mapping_of(ANYTHING), "no results")
        rows = {
            name: np.array([one[name] for one in stored["seeds"]]) for name in stored["seeds"][0]
        }
        count = len(stored["seeds"])
        lines += [
            f"## {path.stem} ({count} seeds)\n",
            "| row | accuracy | difference |",
            "|---|---|---|",
        ]
        for name, values in rows.items():
            difference = 100 * (values - rows["tuned for free"])
            half = student.ppf(0.975, count - 1) * difference.std(ddof=1) / count**0.5
            shown = "–" if name == "tuned for free" else f"{difference.mean():+.1f} ± {half:.1f}"
            lines.append(
                f"| {name} | {100 * values.mean():.1f} ± {100 * values.std(ddof=1):.1f} | {shown} |"
            )
        lines.append("")
    write_text(RESULTS / "index.md", "\n".join(lines))


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=(*PLANS, "table"))
    stage = parser.parse_args().stage
    if stage == "table":
        table()
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{stage}.json"
    seeds = read_json(path, mapping_of(ANYTHING), "no results")["seeds"] if path.exists() else []
    for seed in SEEDS[len(seeds) :]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seeds.append(one_seed(stage, seed))
        print(stage, seed, seeds[-1], flush=True)
        write_json(path, {"seeds": seeds})


if __name__ == "__main__":
    main()
