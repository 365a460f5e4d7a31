"""Individualized PATE against DP-SGD and IDP-SGD on MNIST (IDP-SGD, Table 11).

    python reproduction/studies/pate.py votes      # about 20 minutes on two cores
    python reproduction/studies/pate.py students

60,000 private images have budgets of 1, 2 and 3 (34, 43 and 23 in 100 of them at random, delta
1e-5). 250 teachers, small convolutional networks, vote on 9,000 public images without labels; 1,000
others are the test. `votes` trains two ensembles for each of five seeds: one in which teachers hold
records of one budget each ("groups", for uniform and weighted votes), and one in which a record is
with 1, 2 or 3 teachers ("copies"). It stores how many teachers of each group vote for each class;
all costs and answers are computed from these counts.
`students` writes results/pate/index.md. What was decided beforehand is in its docstring.
Fixed seeds make all results NOT PRIVATE: they show how private runs would perform.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.pate.shards import shards
from ownerwise.pate.teachers import train_teachers

RESULTS = Path(__file__).parents[1] / "results/pate"
SEEDS = range(5)
TEACHERS = 250
BUDGETS, SHARES = (1.0, 2.0, 3.0), (0.34, 0.43, 0.23)
COPIES = (1, 2, 3)
STEPS, BATCH, LR = 400, 20, 4e-3
PUBLIC = 9_000


def teacher() -> nn.Module:
    """Return a new teacher, a small convolutional network for images of 14 by 14 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 5, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(24 * 6 * 6, 10)),
    )


def shifted(images: Tensor, step: int) -> Tensor:
    """Return a step's images moved by up to one pixel in each direction, all alike."""
    down, right = np.random.default_rng(step).integers(-1, 2, 2).tolist()
    return torch.roll(images, (down, right), (-2, -1))


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the private images with labels, and the images that are public or for the test.

    Each pixel is the mean of four of the original ones.
    """
    mnist = ow.data.load("mnist")
    parts = (mnist.train, mnist.test)
    inputs = [torch.from_numpy(part.inputs).float().reshape(-1, 1, 28, 28) for part in parts]
    inputs = [functional.avg_pool2d(images, 2) for images in inputs]
    targets = [torch.from_numpy(part.targets).long() for part in parts]
    return inputs[0], targets[0], inputs[1], targets[1]


def groups_of(seed: int, records: int) -> np.ndarray:
    """Return the budget group of every private record."""
    ends = np.round(np.cumsum(SHARES) * records).astype(int)
    order = np.random.default_rng(seed).permutation(records)
    groups = np.empty(records, dtype=np.int64)
    groups[order] = np.searchsorted(ends, np.arange(records), side="right")
    return groups


def public_part(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the public images and of the test images."""
    order = np.random.default_rng(1000 + seed).permutation(10_000)
    return order[:PUBLIC], order[PUBLIC:]


def ensembles(groups: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the first teacher, the number of teachers and the copies of every record."""
    ends = np.round(np.cumsum(SHARES) * TEACHERS).astype(int)
    first, count = np.append(0, ends[:-1]), np.diff(np.append(0, ends))
    one = np.ones(len(groups), dtype=np.int64)
    return {
        "groups": (first[groups], count[groups], one),
        "copies": (0 * one, TEACHERS * one, np.array(COPIES)[groups]),
    }


def train(seed: int) -> None:
    """Train both ensembles for a seed, and store the counts of their votes."""
    inputs, targets, others, _ = data()
    groups = groups_of(seed, len(inputs))
    questions = others[public_part(seed)[0]]
    counts: dict[str, np.ndarray] = {}
    seconds = {}
    for name, (first, count, copies) in ensembles(groups).items():
        since = time.process_time()
        held = shards(range(len(inputs)), first, count, copies, TEACHERS, key=seed)
        ensemble = train_teachers(
            teacher, inputs, targets, held,
            steps=STEPS, batch_size=BATCH, lr=LR, augment=shifted, seed=seed,
        )  # fmt: skip
        votes = ensemble.votes(questions)
        if name == "groups":
            for group, start in enumerate(np.unique(first)):
                stop = start + np.unique(count[groups == group])[0]
                counts[f"group_{group}"] = counted(votes[start:stop])
        else:
            counts[name] = counted(votes)
        seconds[name] = time.process_time() - since
        print(seed, name, {n: round(s) for n, s in seconds.items()}, "CPU seconds", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(RESULTS / f"votes-{seed}.npz", **counts)


def counted(votes: np.ndarray) -> np.ndarray:
    """Return how many teachers vote for each class, uint8 [questions, classes]."""
    return np.stack([(votes == k).sum(0) for k in range(10)], axis=1).astype(np.uint8)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("votes", "students"))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    options = parser.parse_args()
    if options.stage == "votes":
        for seed in options.seeds:
            train(seed)


if __name__ == "__main__":
    main()
