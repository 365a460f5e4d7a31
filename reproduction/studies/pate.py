"""Individualized PATE against DP-SGD and IDP-SGD on MNIST (IDP-SGD, Table 11).

    python reproduction/studies/pate.py votes
    python reproduction/studies/pate.py students
    python reproduction/studies/pate.py steps
    python reproduction/studies/pate.py table

60,000 private images have budgets of 1, 2 and 3 (34, 43 and 23 in 100 of them at random, delta
1e-5); 9,000 public images have no labels; 1,000 others are the test.

`votes` trains two ensembles of 250 teachers, small convolutional networks, for each of five seeds:
one in which teachers hold records of one budget each ("groups", for uniform and weighted votes),
and one in which a record is with 1, 2 or 3 teachers ("copies"). It stores how many teachers of each
group vote for each class; all costs and answers are computed from these counts.
`students` releases answers: to the first 100, 300 or 1,000 questions without a test (GNMax), and to
at most 100 of the first 300, if 150 teachers agree by a noised test (Confident-GNMax). A student of
the same kind as the teachers learns from the answers, and then from its own predictions for all
public images (self-training).
`steps` trains the same network on the private images by DP-SGD (budget 1 for all) and by IDP-SGD
(method "sample"). The model labels all public images, and a student learns from them in the same
way.
`table` writes results/pate/index.md.

What was decided beforehand: the settings above, accuracy on the 1,000 test images. How long
students train, and the settings of `steps`, were chosen on the first seed and on one that is not
used; that choice is not accounted for. Networks are small, so that the study takes minutes.
Fixed seeds make all results NOT PRIVATE: they show how private runs would perform.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
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
STUDENT_STEPS = 1000
PRIVATE_PLAN = {"steps": 1500, "batch_size": 2000, "clip_norm": 0.5}
PRIVATE_LR = 8.0
PAIRS = (
    ("weight, 100 answers", "uniform, 100 answers"),
    ("weight, 300 answers", "uniform, 300 answers"),
    ("weight, 1000 answers", "uniform, 1000 answers"),
    ("copies, 300 answers", "uniform, 300 answers"),
    ("weight, 100 of 300 answers", "weight, 100 answers"),
    ("IDP-SGD", "weight, 1000 answers"),
    ("IDP-SGD", "DP-SGD"),
)
"""The differences that the table shows."""


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


def parts() -> tuple[np.ndarray, np.ndarray]:
    """Return the first teacher and the number of teachers of each budget group."""
    ends = np.round(np.cumsum(SHARES) * TEACHERS).astype(int)
    return np.append(0, ends[:-1]), np.diff(np.append(0, ends))


def ensembles(groups: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the first teacher, the number of teachers and the copies of every record."""
    first, count = parts()
    one = np.ones(len(groups), dtype=np.int64)
    return {
        "groups": (first[groups], count[groups], one),
        "copies": (0 * one, TEACHERS * one, np.array(COPIES)[groups]),
    }


def train(seed: int) -> None:
    """Train both ensembles for a seed, and store the counts of their votes."""
    since = time.process_time()
    inputs, targets, others, _ = data()
    groups = groups_of(seed, len(inputs))
    questions = others[public_part(seed)[0]]
    counts: dict[str, np.ndarray] = {}
    for name, (first, count, copies) in ensembles(groups).items():
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
    print(f"seed {seed}: {time.process_time() - since:.0f} CPU seconds", flush=True)
    counts["cpu_seconds"] = np.array(time.process_time() - since)
    RESULTS.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(RESULTS / f"votes-{seed}.npz", **counts)


def counted(votes: np.ndarray) -> np.ndarray:
    """Return how many teachers vote for each class, uint8 [questions, classes]."""
    return np.stack([(votes == k).sum(0) for k in range(10)], axis=1).astype(np.uint8)


ASKED = ((100, 100, None), (300, 300, None), (1000, 1000, None), (300, 100, 150.0))
"""Questions, the most answers and the threshold of the test, for every row."""

METHODS = ("uniform", "weight", "copies")


def plan_of(
    method: str, groups: np.ndarray, questions: int, answers: int, threshold: float | None
) -> ow.pate.PatePlan:
    """Return the plan of a method, for the teachers that were trained."""
    owners = ow.Owners(None, np.array(BUDGETS)[groups])
    plan = ow.pate.plan(
        owners,
        questions=questions,
        answers=answers,
        threshold=threshold,
        teachers=TEACHERS,
        method=method,
    )
    if method == "copies":
        return plan
    first, count = parts()  # a split into halves is rounded in another way by the plan
    return dataclasses.replace(plan, first=first, count=count)


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
    """Return the accuracy of a student that learns from answers, then from its own predictions.

    Args:
        images: all public images.
        labels: the labels of the first of them; `NO_ANSWER` where there is none.
        test: test images and labels.
        seed: seed of the weights and the draws.
    """
    torch.manual_seed(seed)
    student = teacher()
    answered = torch.from_numpy(np.flatnonzero(labels != ow.pate.NO_ANSWER))
    chosen = torch.from_numpy(labels)[answered]
    _fit(student, images[answered], chosen)
    own = predictions(student, images)
    own[answered] = chosen
    _fit(student, images, own)
    return accuracy(student, test)


def predictions(model: nn.Module, images: Tensor) -> Tensor:
    """Return the most probable class of each image."""
    with torch.no_grad():
        return model(images).argmax(1)


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Return the share of correct predictions."""
    return float((predictions(model, test[0]) == test[1]).float().mean())


def _fit(student: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, weight_decay=1e-4)
    for step in range(STUDENT_STEPS):
        rows = torch.randint(0, len(labels), (64,))
        optimizer.zero_grad()
        outputs = student(shifted(images[rows], step))
        functional.cross_entropy(outputs, labels[rows]).backward()
        optimizer.step()


def students(seed: int) -> None:
    """Answer, train students and store the results of a seed whose votes are stored."""
    since = time.process_time()
    _, _, others, truth = data()
    votes = dict(np.load(RESULTS / f"votes-{seed}.npz"))
    public, held = public_part(seed)
    groups = groups_of(seed, 60_000)
    test = others[held], truth[held]
    right = truth[public].numpy()
    rows = {}
    for method in METHODS:
        for questions, answers, threshold in ASKED:
            plan = plan_of(method, groups, questions, answers, threshold)
            counts = counts_of(plan, votes)
            labels = ow.pate.answer(plan, counts, ow.SecretStream.from_seed(seed))
            answered = labels != ow.pate.NO_ANSWER
            tested = "" if threshold is None else f" of {questions}"
            rows[f"{method}, {answers}{tested} answers"] = {
                "noise": [plan.answer_std, plan.test_std],
                "answered": int(answered.sum()),
                "votes": float((counts.argmax(1) == right[:questions]).mean()),
                "answers": float((labels == right[:questions])[answered].mean()),
                "student": student_accuracy(others[public], labels, test, seed),
                "epsilon": [float(plan.epsilon()[groups == g].max()) for g in range(3)],
            }
    found = {"cpu_seconds": round(time.process_time() - since), "rows": rows}
    write_json(RESULTS / f"students-{seed}.json", found)
    print(seed, {name: round(row["student"], 3) for name, row in rows.items()}, flush=True)


def steps(seed: int) -> None:
    """Train by DP-SGD and by IDP-SGD, let students learn from the models, and store the results."""
    since = time.process_time()
    inputs, targets, others, truth = data()
    public, held = public_part(seed)
    test = others[held], truth[held]
    budgets = np.array(BUDGETS)[groups_of(seed, len(inputs))]
    rows = {}
    for name, epsilon in (
        ("DP-SGD", np.full(len(inputs), budgets.min())),
        ("IDP-SGD", budgets),
    ):
        plan = ow.plan(ow.Owners(None, epsilon), **PRIVATE_PLAN)
        torch.manual_seed(seed)
        model = teacher()
        trainer = ow.Trainer(model, plan, lr=PRIVATE_LR, seed=seed, progress=False)
        trainer.fit((inputs, targets))
        labels = predictions(model, others[public])
        rows[name] = {
            "labels": float((labels == truth[public]).float().mean()),
            "model": accuracy(model, test),
            "student": student_accuracy(others[public], labels.numpy(), test, seed),
        }
    found = {"cpu_seconds": round(time.process_time() - since), "rows": rows}
    write_json(RESULTS / f"steps-{seed}.json", found)
    print(seed, rows, flush=True)


def table() -> None:
    """Write the index from the stored results."""
    answered, private = stored("students"), stored("steps")
    lines = [
        "# Individualized PATE on MNIST\n",
        f"Mean and standard deviation over {len(answered)} seeds, in percent; budgets of 1, 2",
        "and 3 for 34, 43 and 23 in 100 of 60,000 records, 250 teachers. See `studies/pate.py`.\n",
        "| method | noise std (answer, test) | votes right | answered | answers right | student | "
        "ε spent (1, 2, 3) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_row(answered).items():
        rows = list(runs.values())
        votes, answers, student = (
            _percent([row[key] for row in rows]) for key in ("votes", "answers", "student")
        )
        noise = ", ".join(f"{std:.1f}" for std in rows[0]["noise"] if std is not None)
        count = np.mean([row["answered"] for row in rows])
        spent = ", ".join(f"{value:.3f}" for value in rows[0]["epsilon"])
        lines.append(
            f"| {name} | {noise} | {votes} | {count:.0f} | {answers} | {student} | {spent} |"
        )
    lines += [
        "",
        f"The same network trained with the private records ({len(private)} seeds), and a student "
        "of this model:\n",
        "| method | test accuracy | public labels right | student |",
        "|---|---|---|---|",
    ]
    for name, runs in by_row(private).items():
        cells = [
            _percent([row[key] for row in runs.values()]) for key in ("model", "labels", "student")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Paired differences between students, in points, with 95% intervals:\n"]
    lines += ["| difference | seeds | points |", "|---|---:|---|"]
    found = by_row(answered) | by_row(private)
    for one, other in PAIRS:
        shared = sorted(found.get(one, {}).keys() & found.get(other, {}).keys())
        if len(shared) > 1:
            apart = [found[one][at]["student"] - found[other][at]["student"] for at in shared]
            half = 100 * stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart)
            mean = 100 * np.mean(apart)
            lines.append(f"| {one} − {other} | {len(apart)} | {mean:+.1f} ± {half:.1f} |")
    write_text(RESULTS / "index.md", "\n".join(lines) + "\n")


def stored(kind: str) -> dict[str, Any]:
    """Return {seed: stored results}."""
    paths = sorted(RESULTS.glob(f"{kind}-*.json"))
    return {
        path.stem.rpartition("-")[2]: read_json(path, mapping_of(ANYTHING), "no results")
        for path in paths
    }


def by_row(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {row: {seed: its figures}}."""
    rows: dict[str, dict[str, Any]] = {}
    for seed, one in found.items():
        for name, figures in one["rows"].items():
            rows.setdefault(name, {})[seed] = figures
    return rows


def _percent(values: list[float]) -> str:
    deviation = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{deviation}"


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    stages = {"votes": train, "students": students, "steps": steps}
    parser.add_argument("stage", choices=(*stages, "table"))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    options = parser.parse_args()
    if options.stage == "table":
        table()
        return
    for seed in options.seeds:
        stages[options.stage](seed)


if __name__ == "__main__":
    main()
