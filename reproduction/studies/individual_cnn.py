"""Individual accounting with a convolutional network: the rows of IDP-SGD's Table 3 once more.

    python reproduction/studies/individual_cnn.py run --runs 0.3
    python reproduction/studies/individual_cnn.py table

The small CNN of the papers (26,010 parameters) is trained on the first 20,000 training images, one
owner each. All of them take part in every step: SGD with momentum 0.9, clip norm 1, delta 1e-5. The
noise is that with which a clipped record can take 60 steps, where DP-SGD stops; with individual
accounting, the same run goes on to 100 steps. `0.3, 100 steps` is DP-SGD with as many steps and the
noise that they need. The learning rate was the best of 0.1, 0.3 and 1 in simulations with 2,000
other images and a tenth of the noise, which is not accounted for. All runs start from the same
weights with the same noise. They have fixed seeds and are NOT PRIVATE; so are the curves of active
records. Results are in reproduction/results/individual.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ownerwise as ow
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text
from ownerwise_reproduction.data.mnist import load_mnist

RESULTS = Path(__file__).parents[1] / "results/individual"
RECORDS, CLIPPED_STEPS, STEPS, EVERY = 20_000, 60, 100, 10
RATE, MOMENTUM, CLIP_NORM, DELTA = 0.3, 0.9, 1.0, 1e-5

RUNS = {
    "0.3": ((0.3, 0.3), CLIPPED_STEPS),
    "0.30/0.31": ((0.3, 0.31), CLIPPED_STEPS),
    "0.3, 100 steps": ((0.3, 0.3), STEPS),
}
"""The budgets of the two halves of the records, and the steps that clipped records can take."""


def images_of(part: Any) -> tuple[Tensor, Tensor]:
    """Return images with one channel, and their labels."""
    images, labels = part.tensors()
    return images.reshape(-1, 1, 28, 28), labels


def run(name: str, seed: int) -> None:
    """Take a run, and store its curve after every tenth step."""
    data = load_mnist()
    assert data.test is not None
    images, labels = (part[:RECORDS] for part in images_of(data.train))
    held, truth = images_of(data.test)
    budgets, clipped_steps = RUNS[name]
    owners = ow.Owners(np.arange(RECORDS), np.repeat(budgets, RECORDS // 2), DELTA)
    plan = ow.plan(
        owners,
        method="individual",
        steps=STEPS,
        clipped_steps=clipped_steps,
        clip_norm=CLIP_NORM,
    )
    torch.manual_seed(seed)
    model = ow.models.mnist_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    stream = ow.SecretStream.from_seed(seed)
    step = ow.PrivateStep(
        model, plan, optimizer, functional.cross_entropy, stream=stream, not_private=True
    )
    curve: list[dict[str, Any]] = []
    seconds: list[float] = []
    for batch in ow.PoissonBatches((images, labels), plan, stream=stream):
        began = time.process_time()
        step(batch)
        seconds.append(time.process_time() - began)
        if step.updates % EVERY:
            continue
        peek = step.peek
        assert peek is not None
        assert peek.active is not None
        with torch.no_grad():
            correct = model(held).argmax(1) == truth
        curve.append(
            {
                "step": step.updates,
                "accuracy": float(correct.double().mean()),
                "active": [float(half.mean()) for half in np.array_split(peek.active, 2)],
            }
        )
        print(name, curve[-1], f"{np.median(seconds):.2f} CPU seconds a step", flush=True)
        stored = {"run": name, "seconds": float(np.median(seconds)), "curve": curve}
        write_json(path_of(name, seed), stored)


def path_of(name: str, seed: int) -> Path:
    """Return the file of a run's results."""
    words = name.replace("/", "-").replace(", ", "-").replace(" ", "-")
    return RESULTS / f"cnn-{words}-{seed}.json"


def table(seed: int) -> str:
    """Return the results as Markdown."""
    curves, seconds = {}, []
    for name in RUNS:
        if not path_of(name, seed).exists():
            continue
        stored = read_json(path_of(name, seed), mapping_of(ANYTHING), "no results")
        curves[name] = {point["step"]: point for point in stored["curve"]}
        seconds.append(stored["seconds"])
    rows = {
        "0.3: dp-sgd, 60 steps": ("0.3", CLIPPED_STEPS),
        "0.3: dp-sgd, 100 steps": ("0.3, 100 steps", STEPS),
        "0.3: accounting, 100 steps": ("0.3", STEPS),
        "0.30/0.31: assignment, 60 steps": ("0.30/0.31", CLIPPED_STEPS),
        "0.30/0.31: accounting and assignment, 100 steps": ("0.30/0.31", STEPS),
    }
    lines = [
        "| row | test accuracy, % | active records |",
        "|---|---:|---:|",
    ]
    for row, (name, step) in rows.items():
        if step not in curves.get(name, {}):
            continue
        point = curves[name][step]
        lines.append(f"| {row} | {100 * point['accuracy']:.2f} | {_shares(point)} |")
    lines += [
        "",
        f"One seed, so differences of a point may be chance. A step over {RECORDS:,} images takes "
        f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds.",
        "",
        "Accuracy in percent / active records (NOT PRIVATE) after some steps:",
        "",
        "| step | " + " | ".join(curves) + " |",
        "|---:|" + "---:|" * len(curves),
    ]
    for step in range(EVERY, 1 + min(max(curve) for curve in curves.values()), EVERY):
        cells = (curve[step] for curve in curves.values())
        shown = " | ".join(f"{100 * one['accuracy']:.1f} / {_shares(one)}" for one in cells)
        lines.append(f"| {step} | {shown} |")
    return "\n".join(lines)


def _shares(point: dict[str, Any]) -> str:
    return " and ".join(f"{100 * share:.1f}%" for share in dict.fromkeys(point["active"]))


def main() -> None:
    """Run the study, or write its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "run":
        for name in options.runs:
            run(name, options.seed)
        return
    words = table(options.seed)
    write_text(RESULTS / "cnn.md", f"# Individual accounting, small CNN on MNIST\n\n{words}\n")
    print(words)


if __name__ == "__main__":
    main()
