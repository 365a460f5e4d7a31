"""Individualized PATE against DP-SGD and IDP-SGD on MNIST (IDP-SGD, Table 11).

    python reproduction/studies/pate.py votes      # about 20 minutes on two cores
    python reproduction/studies/pate.py students
    python reproduction/studies/pate.py table

60,000 private images have budgets of 1, 2 and 3 (34, 43 and 23 in 100 of them at random, delta
1e-5). 250 teachers, small convolutional networks, vote on 9,000 public images without labels; 1,000
others are the test. `votes` trains two ensembles for each of five seeds: one in which teachers hold
records of one budget each ("groups", for uniform and weighted votes), and one in which a record is
with 1, 2 or 3 teachers ("copies"). It stores how many teachers of each group vote for each class;
all costs and answers are computed from these counts.
`students` answers the questions for 100, 300 and 1,000 answers without a test (GNMax; with a test
for thousands of questions, these budgets leave too much noise on it), trains a student of the same
kind on the answers and then on its own predictions for all public images (self-training), and
stores the results; `table` writes results/pate/index.md.
What was decided beforehand: the settings above, accuracy of students on the 1,000 test images.
Teachers, students and the number of steps are small, so that the study takes minutes.
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
from ownerwise.files import ANYTHING, mapping_of, read_json, write_json, write_text
from ownerwise.pate.shards import shards
from ownerwise.pate.teachers import train_teachers

RESULTS = Path(__file__).parents[1] / "results/pate"
SEEDS = range(5)
TEACHERS = 250
BUDGETS, SHARES = (1.0, 2.0, 3.0), (0.34, 0.43, 0.23)
COPIES = (1, 2, 3)
STEPS, BATCH, LR = 250, 20, 4e-3
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


ANSWERS = (100, 300, 1000)
METHODS = ("uniform", "weight", "copies")


def plan_of(method: str, answers: int, groups: np.ndarray) -> ow.pate.PatePlan:
    """Return the plan of a method with this many answers."""
    owners = ow.Owners(None, np.array(BUDGETS)[groups])
    return ow.pate.plan(
        owners, questions=answers, answers=answers, teachers=TEACHERS, method=method
    )


def counts_of(plan: ow.pate.PatePlan, votes: dict[str, np.ndarray]) -> np.ndarray:
    """Return the weighted counts of the first questions from the stored votes."""
    if plan.method == "copies":
        return votes["copies"][: plan.questions].astype(np.float64)
    parts = [votes[f"group_{group}"] for group in range(len(BUDGETS))]
    sums = [weight * part for weight, part in zip(plan.weights, parts, strict=True)]
    return np.sum(sums, axis=0)[: plan.questions]


def student_accuracy(
    images: Tensor, labels: np.ndarray, test: tuple[Tensor, Tensor], seed: int
) -> float:
    """Return the accuracy of a student that learns from answers, then from its own predictions."""
    torch.manual_seed(seed)
    student = teacher()
    chosen = torch.from_numpy(labels)
    _fit(student, images[: len(labels)], chosen)
    with torch.no_grad():
        own = student(images).argmax(1)
    own[: len(labels)] = chosen
    _fit(student, images, own)
    with torch.no_grad():
        return float((student(test[0]).argmax(1) == test[1]).float().mean())


def _fit(student: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3, weight_decay=1e-4)
    for step in range(250):
        rows = torch.randint(0, len(labels), (64,))
        optimizer.zero_grad()
        outputs = student(shifted(images[rows], step))
        functional.cross_entropy(outputs, labels[rows]).backward()
        optimizer.step()


def students(seeds: list[int]) -> None:
    """Answer, train students and store the results of the seeds whose votes are stored."""
    _, _, others, truth = data()
    for seed in seeds:
        path = RESULTS / f"votes-{seed}.npz"
        if not path.exists():
            continue
        votes = dict(np.load(path))
        public, held = public_part(seed)
        groups = groups_of(seed, 60_000)
        right = truth[public].numpy()
        rows = {}
        for method in METHODS:
            for answers in ANSWERS:
                plan = plan_of(method, answers, groups)
                counts = counts_of(plan, votes)
                labels = ow.pate.answer(plan, counts, ow.SecretStream.from_seed(seed))
                rows[f"{method}, {answers} answers"] = {
                    "noise": plan.answer_std,
                    "votes": float((counts.argmax(1) == right[:answers]).mean()),
                    "answers": float((labels == right[:answers]).mean()),
                    "student": student_accuracy(
                        others[public], labels, (others[held], truth[held]), seed
                    ),
                    "epsilon": [float(plan.epsilon()[groups == g].max()) for g in range(3)],
                }
        write_json(RESULTS / f"students-{seed}.json", rows)
        print(seed, {name: round(row["student"], 3) for name, row in rows.items()}, flush=True)


def table() -> None:
    """Write the index from the stored results."""
    seeds = [
        read_json(path, mapping_of(ANYTHING), "no results")
        for path in sorted(RESULTS.glob("students-*.json"))
    ]
    lines = [
        "# Individualized PATE on MNIST\n",
        f"Mean and standard deviation over {len(seeds)} seeds, in percent; budgets of 1, 2 and 3",
        "for 34, 43 and 23 in 100 of 60,000 records, 250 teachers. See `studies/pate.py`.\n",
        "| method | noise std | votes right | answers right | student | ε spent (1, 2, 3) |",
        "|---|---|---|---|---|---|",
    ]
    for name in seeds[0]:
        rows = [one[name] for one in seeds]
        cells = [_percent([row[key] for row in rows]) for key in ("votes", "answers", "student")]
        spent = ", ".join(f"{value:.3f}" for value in rows[0]["epsilon"])
        lines.append(f"| {name} | {rows[0]['noise']:.1f} | {' | '.join(cells)} | {spent} |")
    write_text(RESULTS / "index.md", "\n".join(lines) + "\n")


def _percent(values: list[float]) -> str:
    deviation = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{deviation}"


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("votes", "students", "table"))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    options = parser.parse_args()
    if options.stage == "votes":
        for seed in options.seeds:
            train(seed)
    elif options.stage == "students":
        students(options.seeds)
    else:
        table()


if __name__ == "__main__":
    main()
