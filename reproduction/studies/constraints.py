"""Rate constraints under privacy: trade-offs between error and constraint, and their cost.

    OWNERWISE_DATA=... python reproduction/studies/constraints.py   # half an hour on one core

Every result is one entry in reproduction/results/constraints/runs.json. Existing entries are not
computed again; index.md next to that file is written from them. Settings were chosen on held-out
training records, never on test records; this choice is not accounted for.
Runs have fixed seeds and are NOT PRIVATE: they show how private runs would perform.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from constraints_data import TASKS, Task
from constraints_table import write_table
from ownerwise.batches import (
    Batch,
)
from ownerwise.data.splits import positional_split
from ownerwise.files import write_json
from ownerwise.mechanisms import constraints as rates

RESULTS = Path(__file__).parents[1] / "results/constraints/runs.json"
Job = Callable[[], dict[str, Any]]
SEEDS = range(5)
BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
DELTA = 1e-5


@dataclass(frozen=True)
class Settings:
    """How to train one model; the batch is given as a share of the records."""

    steps: int = 60
    batch: float = 0.5
    lr: float = 4.0
    clip: float = 1.0
    ascent: float = 0.4
    damping: float = 4.0
    cap: float = 10.0
    share: float = 0.1
    optimizer: str = "SGD"
    hard: bool = True
    temperature: float = 1.0
    schedule: str = "linear"
    epsilon: float = 1.0
    noise: str = "gaussian"


SETTINGS = {  # chosen from a few dozen by the private runs' results on validation records
    "adult": Settings(steps=100, lr=0.1, optimizer="Adam", ascent=0.2),
    "credit": Settings(steps=60, lr=10.0),
    "parkinsons": Settings(steps=60, lr=20.0),
    "heart": Settings(steps=20, batch=1.0, lr=4.0),
    "nine": Settings(steps=100, lr=10.0),
    "hours": Settings(steps=100, lr=0.1, optimizer="Adam", ascent=0.2),  # those of Adult
}


@cache
def task(name: str) -> Task:
    return TASKS[name]()


@cache
def parts(name: str, seed: int, tuning: bool = False) -> tuple[Task, Task]:
    """Return training and test records, split by seed; for tuning, split the training records."""
    train, test = task(name).split(0.75, seed)
    return train.split(0.8, 1) if tuning else (train, test)


@cache
def partition(name: str, by_label: bool) -> ow.Partition:
    columns: dict[str, Any] = {"group": range(9)} if name == "nine" else {"sex": ("female", "male")}
    classes = task(name).classes
    labelled = {**columns, "label": tuple(range(classes))}
    return ow.Partition(labelled if by_label else columns, classes=classes)


def make_constraints(name: str, kind: str, bound: float) -> list[rates.Constraint]:
    """Return the constraints of an experiment."""
    if kind == "parity":
        column = "group" if name == "nine" else "sex"
        return rates.demographic_parity(partition(name, False), column, max_gap=bound)
    if kind == "odds":
        return rates.equalized_odds(partition(name, True), "sex", max_gap=bound)
    return rates.false_negative_rate(partition(name, True), max_rate=bound)


def targets(part: ow.Partition, task: Task) -> Tensor:
    columns = {name: values for name, values in task.columns.items() if name in part.columns}
    return part.targets(task.labels, columns)


def linear(task: Task) -> nn.Module:
    model = nn.Linear(task.inputs.shape[1], task.classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def network(task: Task) -> nn.Module:
    return nn.Sequential(nn.Linear(task.inputs.shape[1], 64), nn.Tanh(), nn.Linear(64, 2))


@cache
def make_plan(name: str, tuning: bool, settings: Settings, constrained: bool) -> ow.Plan:
    records = len(parts(name, 0, tuning)[0])
    owners = ow.Owners(np.zeros(records, dtype=int), {0: settings.epsilon}, delta=DELTA)
    made = make_constraints(name, "parity", 0.1)
    paid = {
        "constraints": ow.RateConstraints(made),
        "release_share": settings.share,
        "hardened": settings.hard,  # counting predicted classes needs this
    }
    return ow.plan(
        owners,
        "uniform",
        steps=settings.steps,
        batch_size=settings.batch * records,
        clip_norm=settings.clip,
        release_noise=settings.noise,
        **(paid if constrained else {}),
    )


def private(
    name: str, kind: str, bound: float, seed: int, settings: Settings, tuning: bool = False
) -> dict[str, Any]:
    """Train once with privacy, and return the results on the held-out records."""
    train, test = parts(name, seed, tuning)
    made = make_constraints(name, kind, bound)
    part = made[0].partition
    fair = ow.RateConstraints(
        made, ascent=settings.ascent, damping=settings.damping, cap=settings.cap,
        hard=settings.hard, temperature=settings.temperature,
    )  # fmt: skip
    trainer = ow.Trainer(
        linear(train),
        make_plan(name, tuning, settings, True),
        lr=settings.lr,
        optimizer=getattr(torch.optim, settings.optimizer),
        schedule=settings.schedule,
        constraints=fair,
        seed=1000 + seed,
        evaluate_every=settings.steps,
        progress=False,
    )
    run = trainer.fit((train.inputs, targets(part, train)), test=(test.inputs, targets(part, test)))
    return figures(made, run.history[-1]["test"])


def unconstrained(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train without constraints, but measure the constraint's value."""
    train, test = parts(name, seed)
    model = linear(train)
    trainer = ow.Trainer(
        model, make_plan(name, False, settings, False), lr=settings.lr, schedule=settings.schedule,
        optimizer=getattr(torch.optim, settings.optimizer),
        seed=1000 + seed, evaluate_every=settings.steps, progress=False,
    )  # fmt: skip
    trainer.fit((train.inputs, torch.from_numpy(train.labels)))
    return measured(model, make_constraints(name, "parity", 0.0), test)


def without_noise(
    name: str, kind: str, bound: float, seed: int, clip: float = 1e6
) -> dict[str, Any]:
    """Constrained training by the same step on all records, without noise: NOT private.

    Also returns how well the constraint was met on the training records.
    """
    train, test = parts(name, seed)
    made = make_constraints(name, kind, bound)
    steps, ascent = (400, 4.0) if name == "heart" else (200, 0.4)
    fair = ow.RateConstraints(made, hard=True, cap=30.0, ascent=ascent)
    owners = ow.Owners(np.zeros(len(train), dtype=int), {0: 1.0}, delta=DELTA)
    plan = ow.plan(
        owners, "uniform", steps=1, batch_size=len(train), clip_norm=clip, release_std=1000.0,
        hardened=True,
    )  # fmt: skip
    model = linear(train)
    optimizer = torch.optim.Adam(model.parameters())
    step = ow.PrivateStep(
        model, plan, optimizer, fair.penalised(functional.cross_entropy), release=fair,
        stream=ow.SecretStream.from_seed(0), performance=ow.Performance(memory_target=1 << 40),
    )  # fmt: skip
    batch = Batch(
        0,
        np.arange(len(train)),
        np.zeros(len(train), dtype=np.int64),
        (train.inputs, targets(made[0].partition, train)),
    )
    for at in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - at / steps)
        for parameter, total in step.clipped_sum(batch).items():
            parameter.grad = (total / len(train)).to(parameter.dtype)
        optimizer.step()
    return measured(model, made, test) | {"met": measured(model, made, train)["value"]}


@torch.no_grad()
def measured(model: nn.Module, made: list[rates.Constraint], test: Task) -> dict[str, Any]:
    predicted = model(test.inputs).argmax(dim=1).numpy()
    cells = targets(made[0].partition, test)[:, 1].numpy()
    values = ow.RateConstraints(made).measure(predicted, cells)
    accuracy = float((predicted == test.labels).mean())
    return figures(made, {"accuracy": accuracy, "constraints": values})


def figures(made: list[rates.Constraint], found: dict[str, Any]) -> dict[str, Any]:
    """Return the error, the largest constrained value, and the largest violation of a bound."""
    values = {one: found["constraints"][one.name] for one in made}
    return {
        "error": 1 - found["accuracy"],
        "value": max(abs(value) for value in values.values()),
        "excess": max(one.excess(value) for one, value in values.items()),
    }


def step_time() -> dict[str, Any]:
    """Return CPU times of constrained and plain private steps, measured alternately."""
    train, _ = parts("adult", 0)
    made = ow.RateConstraints(make_constraints("adult", "parity", 0.1))
    both = targets(made.partition, train)
    settings = replace(SETTINGS["adult"], steps=300, batch=4096 / len(train), hard=False)

    def contender(build: Callable[[Task], nn.Module], constrained: bool) -> Iterator[float]:
        plan = make_plan("adult", False, settings, constrained)
        model = build(train)
        plain = functional.cross_entropy
        step = ow.PrivateStep(
            model, plan, torch.optim.SGD(model.parameters(), lr=0.1),
            made.penalised(plain) if constrained else plain,
            release=made if constrained else None, stream=ow.SecretStream.from_seed(0),
        )  # fmt: skip
        data = (train.inputs, both if constrained else both[:, 0].contiguous())
        for batch in ow.PoissonBatches(data, plan, stream=ow.SecretStream.from_seed(0)):
            before = time.process_time()
            step(batch)
            yield time.process_time() - before

    found: dict[str, Any] = {}
    for name, build in (("linear", linear), ("network", network)):
        turns = np.array(list(zip(*(contender(build, c) for c in (False, True)), strict=True)))
        plain, constrained = np.median(turns[20:], axis=0).tolist()  # the first ones warm up
        found[name] = {
            "plain": plain,
            "constrained": constrained,
            "ratio": constrained / plain,
        }
    return found


def make_pictures(folder: Path, records: int = 4500, size: int = 12) -> Path:
    """Write grey images and a list of their attributes; bright ones mostly have vertical bars."""
    from PIL import Image

    random = np.random.default_rng(5)
    bright = random.random(records) < 0.5
    vertical = random.random(records) < np.where(bright, 0.7, 0.3)
    wave = np.sin(np.arange(size) * 1.6 + random.uniform(0, 6, (records, 1)))
    bars = np.where(vertical[:, None, None], wave[:, None, :], wave[:, :, None])
    light = 0.5 * bars + 0.8 * bright[:, None, None] + random.normal(0, 0.6, (records, size, size))
    pixels = np.clip(light * 40 + 100, 0, 255).astype(np.uint8)
    rows = [str(records), "vertical bright"]
    for number in range(records):
        Image.fromarray(pixels[number]).save(folder / f"{number:06d}.png")
        marks = (1 if attribute[number] else -1 for attribute in (vertical, bright))
        rows.append(f"{number:06d}.png  {'  '.join(map(str, marks))}")
    path = folder / "attributes.txt"
    path.write_text("\n".join(rows) + "\n")
    return path


def images() -> dict[str, Any]:
    """Train a residual network to detect vertical bars in images, grouped by brightness."""
    with TemporaryDirectory() as folder:
        data = ow.data.load_table(
            make_pictures(Path(folder)), target="vertical", classes=[-1, 1], columns=["bright"],
            features={"file": ow.data.Pictures(channels=1, scale="signed")}, test_share=None,
        )  # fmt: skip
    third = positional_split(data.train.targets, every=3)
    part = ow.Partition({"bright": ("-1", "1")}, classes=2)
    train, test = (
        (records.tensors()[0], part.targets(records.targets, {"bright": records.columns["bright"]}))
        for records in (data.train.take(~third), data.train.take(third))
    )
    owners = ow.Owners(np.zeros(len(train[0]), dtype=int), {0: 8.0}, delta=DELTA)
    found = {}
    for name, bound in (("constrained", 0.1), ("unconstrained", 1.0)):
        fair = ow.RateConstraints(
            rates.demographic_parity(part, "bright", max_gap=bound), hard=True
        )
        plan = ow.plan(
            owners, "uniform", steps=100, batch_size=300, constraints=fair, hardened=True
        )
        torch.manual_seed(0)
        model = ow.models.ResNet18(classes=2, channels=1, width=8, groups=4)
        trainer = ow.Trainer(
            model, plan, lr=1.0, schedule="linear", constraints=fair, seed=3, evaluate_every=100,
            progress=False,
        )  # fmt: skip
        run = trainer.fit(train, test=test)
        found[name] = figures(fair.constraints, run.history[-1]["test"])
    return found


def jobs() -> dict[str, Job]:
    """Return all jobs by name."""
    found: dict[str, Job] = {"step time": step_time}

    def add(name: str, kind: str, bound: float, label: str = "private", **changes: Any) -> None:
        settings = replace(SETTINGS[name], **changes)
        for seed in SEEDS:
            found[f"{name} {kind} {bound:g} {label}, seed {seed}"] = lambda s=seed: {
                **private(name, kind, bound, s, settings), "settings": asdict(settings)
            }  # fmt: skip

    def add_plain(
        name: str, kind: str, bound: float, label: str = "without noise", clip: float = 1e6
    ) -> None:
        for seed in SEEDS:
            found[f"{name} {kind} {bound:g} {label}, seed {seed}"] = lambda s=seed: without_noise(
                name, kind, bound, s, clip
            )

    for name in ("adult", "credit", "parkinsons"):
        for bound in BOUNDS:
            add(name, "parity", bound)
            if bound in (0.02, 0.05, 0.1):
                add_plain(name, "parity", bound)
        for seed in SEEDS:
            found[f"{name} unconstrained, seed {seed}"] = lambda n=name, s=seed: unconstrained(
                n, s, SETTINGS[n]
            )
    for bound in (0.02, 0.05, 0.1, 0.15):
        add("adult", "odds", bound)
    for bound in (0.05, 0.1, 0.2):
        for epsilon in (1.0, 4.0):
            add("heart", "misses", bound, f"epsilon {epsilon:g}", epsilon=epsilon)
    add("nine", "parity", 0.05)
    add_plain("nine", "parity", 0.05)
    for bound in (0.02, 0.05, 0.1):
        add("hours", "parity", bound)
    add_plain("hours", "parity", 0.05)
    for seed in SEEDS:
        found[f"hours unconstrained, seed {seed}"] = lambda s=seed: unconstrained(
            "hours", s, SETTINGS["hours"]
        )
    add("adult", "parity", 0.05, "soft", hard=False)
    for temperature in (2.0, 5.0):
        label = f"soft, temperature {temperature:g}"
        add("adult", "parity", 0.05, label, hard=False, temperature=temperature)
    add("adult", "parity", 0.05, "Laplace", noise="laplace")
    for clip in (0.05, 0.3, 1.0, 3.0, 12.5, 100.0):
        add_plain("heart", "misses", 0.0, f"without noise, clip {clip:g}", clip)
    found["images"] = images
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, job in jobs().items():
        if name in results or only not in name:
            continue
        results[name] = job()
        write_json(RESULTS, dict(sorted(results.items())), indent=1)
        print(name, {k: v for k, v in results[name].items() if k != "settings"}, flush=True)
    write_table(results, RESULTS.with_name("index.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
