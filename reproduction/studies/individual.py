"""Individual accounting against full-batch DP-SGD: the rows of IDP-SGD's Table 3 on MNIST.

    python reproduction/studies/individual.py run --seeds 0 20
    python reproduction/studies/individual.py table

All 60,000 training images, one owner each, take part in every step. A linear head of 10 classes is
trained on fixed features: scattering coefficients averaged over 3x3 places, normalised within each
image in 27 groups, multiplied by a public random matrix (200 numbers) and scaled to length 1. SGD
with momentum 0.9, learning rate 20, clip norm 1, delta 1e-5. All rows of a setting have the noise
with which a clipped record can take 40 steps. DP-SGD and assignment stop there; with individual
accounting, the same run goes on to 60 steps, and records retire when their own gradients have used
up their budgets. `0.3: dp-sgd, 60 steps` takes as many steps, with the larger noise that this needs
without individual accounting. The settings were chosen in simulations with other noise, which is
not accounted for.

Settings: `0.3` (everyone has epsilon 0.3), `0.30/0.31` (the first and the second half of the
records, as in the paper) and `0.2/0.4`. Rows: `dp-sgd` (everyone gets the smallest budget),
`assignment` (clip norms in proportion to what budgets allow, without individual accounting),
`accounting` (everyone gets the smallest budget) and `accounting and assignment`. Runs of the same
seed share initial weights and noise.

Runs have fixed seeds and are NOT PRIVATE; so are the curves of active records. Results are in
reproduction/results/individual. `individual_cnn.py` trains a convolutional network instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as students
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.files import write_json, write_text
from ownerwise.models.scattering import Scattering
from ownerwise_reproduction.data.mnist import load_mnist

RESULTS = Path(__file__).parents[1] / "results/individual"
CLIPPED_STEPS, STEPS = 40, 60
RATE, MOMENTUM, CLIP_NORM = 20.0, 0.9, 1.0
FEATURES, DELTA = 200, 1e-5

LONGER = "0.3: dp-sgd, 60 steps"
RUNS: dict[str, tuple[tuple[float, float], str | None, str]] = {
    "0.3, 60 steps": ((0.3, 0.3), None, LONGER),
    "0.3": ((0.3, 0.3), "0.3: dp-sgd", "0.3: accounting"),
    "0.30/0.31": (
        (0.3, 0.31), "0.30/0.31: assignment", "0.30/0.31: accounting and assignment",
    ),
    "0.2": ((0.2, 0.2), "0.2/0.4: dp-sgd", "0.2/0.4: accounting"),
    "0.2/0.4": ((0.2, 0.4), "0.2/0.4: assignment", "0.2/0.4: accounting and assignment"),
}  # fmt: skip
"""For every run, the budgets of the two halves of the records, and the rows that it gives: after
the steps that clipped records can take, and at the end."""

ROWS = [row for _, *rows in RUNS.values() for row in rows if row is not None]

LAST = [last for *_, last in RUNS.values() if last != LONGER]

PAIRS = (
    ("0.3: accounting", "0.3: dp-sgd"),
    ("0.3: accounting", LONGER),
    ("0.30/0.31: accounting and assignment", "0.3: dp-sgd"),
    ("0.30/0.31: accounting and assignment", LONGER),
    ("0.30/0.31: accounting and assignment", "0.3: accounting"),
    ("0.2/0.4: accounting", "0.2/0.4: dp-sgd"),
    ("0.2/0.4: assignment", "0.2/0.4: dp-sgd"),
    ("0.2/0.4: accounting and assignment", "0.2/0.4: dp-sgd"),
    ("0.2/0.4: accounting and assignment", "0.2/0.4: assignment"),
)
"""The differences that the table shows."""

PUBLISHED = {
    "0.3: dp-sgd": "93.29 ± 0.49",
    "0.3: accounting": "93.64 ± 0.46",
    "0.30/0.31: accounting and assignment": "94.16 ± 0.23",
}


@torch.no_grad()
def scattered(images: Tensor) -> Tensor:
    """Return the averaged scattering coefficients of images, [records, 729]."""
    scattering = Scattering(28, 28)
    parts = [
        functional.adaptive_avg_pool2d(scattering(part), 3).flatten(1)
        for part in images.reshape(-1, 1, 28, 28).split(1000)
    ]
    return torch.cat(parts)


def features(coefficients: Tensor) -> Tensor:
    """Return each record's features, which depend on this record and public constants alone."""
    numbers = functional.group_norm(coefficients.view(-1, 81, 3, 3), 27).flatten(1)
    generator = torch.Generator().manual_seed(0)
    numbers = numbers @ torch.randn(numbers.shape[1], FEATURES, generator=generator)
    return functional.normalize(numbers).contiguous()


def load(cache: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test data; the scattering coefficients are stored in `cache`."""
    if not cache.exists():
        data = load_mnist()
        assert data.test is not None
        parts = [part.tensors() for part in (data.train, data.test)]
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(scattered(images), labels) for images, labels in parts], cache)
    train, test = torch.load(cache)
    return (features(train[0]), train[1]), (features(test[0]), test[1])


def plan_of(name: str, records: int) -> ow.Plan:
    """Return the plan of a run."""
    budgets, _, last = RUNS[name]
    epsilon = np.repeat(budgets, [half := records // 2, records - half])
    owners = ow.Owners(np.arange(records), epsilon, DELTA)
    return ow.plan(
        owners,
        method="individual",
        steps=STEPS,
        clipped_steps=STEPS if last == LONGER else CLIPPED_STEPS,
        clip_norm=CLIP_NORM,
    )


def trained(plan: ow.Plan, seed: int, train: Any, test: Any) -> list[dict[str, Any]]:
    """Return the test accuracy and the active records after each step, for both rows of a run.

    No record can retire before `CLIPPED_STEPS`, so up to there the run is one without individual
    accounting.
    """
    model = nn.Linear(FEATURES, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    stream = ow.SecretStream.from_seed(seed)
    step = ow.PrivateStep(
        model, plan, optimizer, functional.cross_entropy, stream=stream, not_private=True
    )
    active: list[list[float]] = []
    found = []
    for batch in ow.PoissonBatches(train, plan, stream=stream):
        step(batch)
        peek = step.peek
        assert peek is not None
        assert peek.active is not None
        active.append([float(half.mean()) for half in np.array_split(peek.active, 2)])
        if len(active) in (CLIPPED_STEPS, STEPS):
            with torch.no_grad():
                correct = model(test[0]).argmax(1) == test[1]
            found.append({"accuracy": float(correct.double().mean()), "active": list(active)})
    return found


def run(seeds: range, names: list[str], cache: Path) -> None:
    """Take the runs with these seeds, and store each result; results that exist are kept."""
    train, test = load(cache)
    path = RESULTS / f"runs-{seeds.start:02d}-{names[0].replace('/', '-').replace(', ', '-')}.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    done = merged()
    for seed in seeds:
        for name in names:
            _, first, last = RUNS[name]
            if str(seed) in done.get(last, {}):
                continue
            results = trained(plan_of(name, len(train[0])), seed, train, test)
            for row, result in zip((first, last), results, strict=True):
                if row is None:
                    continue
                found.setdefault(row, {})[str(seed)] = result
                print(f"{row}: seed {seed}: {result['accuracy']:.4f}", flush=True)
            write_json(path, found, indent=None)


def merged() -> dict[str, dict[str, Any]]:
    """Return the results of all seeds."""
    found: dict[str, dict[str, Any]] = {row: {} for row in ROWS}
    for path in sorted(RESULTS.glob("runs*.json")):
        for row, results in json.loads(path.read_text()).items():
            found[row] |= results
    return {row: results for row, results in found.items() if results}


def half_width(values: np.ndarray) -> float:
    """Return half the length of a 95% interval for the mean."""
    scale = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(students.ppf(0.975, len(values) - 1)) * scale


def shares(row: str, active: np.ndarray) -> str:
    """Return the share of active records, for each half if their budgets differ."""
    budgets = next(budgets for budgets, *rows in RUNS.values() if row in rows)
    halves = active if budgets[0] != budgets[1] else [active.mean()]
    return " / ".join(f"{100 * share:.1f}%" for share in halves)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| row | seeds | test accuracy, % | paper | active records at the end |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, results in found.items():
        accuracy = 100 * np.array([result["accuracy"] for result in results.values()])
        last = np.mean([result["active"][-1] for result in results.values()], axis=0)
        lines.append(
            f"| {row} | {len(results)} | {accuracy.mean():.2f} ± {accuracy.std(ddof=1):.2f} | "
            f"{PUBLISHED.get(row, '')} | {shares(row, last)} |"
        )
    lines += [
        "",
        "Paired differences over shared seeds, in percentage points, with 95% intervals:",
        "",
        "| difference | seeds | points | verdict |",
        "|---|---:|---:|---|",
    ]
    for one, other in PAIRS:
        if one not in found or other not in found:
            continue
        shared = sorted(found[one].keys() & found[other].keys())
        apart = 100 * np.array(
            [found[one][seed]["accuracy"] - found[other][seed]["accuracy"] for seed in shared]
        )
        width, mean = half_width(apart), float(apart.mean())
        verdict = "no significant difference"
        if abs(mean) > width:
            verdict = "better" if mean > 0 else "worse"
        lines.append(f"| {one} − {other} | {len(shared)} | {mean:+.2f} ± {width:.2f} | {verdict} |")
    lines += [
        "",
        "Active records (NOT PRIVATE) after some steps, mean over seeds; for each half of the "
        "records if their budgets differ:",
        "",
        "| step | " + " | ".join(row for row in found if row in LAST) + " |",
        "|---:|" + "---:|" * sum(row in LAST for row in found),
    ]
    for step in range(4, STEPS, 5):
        cells = []
        for row, results in found.items():
            if row in LAST:
                mean = np.mean([result["active"][step] for result in results.values()], axis=0)
                cells.append(shares(row, mean))
        lines.append(f"| {step + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the study, or write its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/ownerwise/individual-features.pt"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "run":
        run(range(*options.seeds), options.runs, options.cache)
        return
    found = merged()
    for path in RESULTS.glob("runs*.json"):
        path.unlink()
    write_json(RESULTS / "runs.json", found, indent=None)
    write_text(RESULTS / "mnist.md", f"# Individual accounting on MNIST\n\n{table(found)}\n")
    print(table(found))


if __name__ == "__main__":
    main()
