"""What INO's weights add to the private step of IDP-SGD, and to an epoch.

    python benchmarks/ino_time.py                    # about three minutes
    python benchmarks/ino_time.py --quick
    python benchmarks/ino_time.py --swap             # INO-SGD's step is made first

Both steps run in one process with one thread and take turns, so that whatever else the machine does
hits both alike. Times are those of the processor, not of the clock: a turn that has to wait for a
core is no longer for it. Ratios are of medians, with the 95 % interval that drawing rounds again
gives, and of fastest turns; the weights are timed alone besides, as a share of the step.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

import ownerwise as ow
from models import CASES, build
from step import RATE, TURN, Step

TAIL = 0.4
CONTENDERS = {"IDP-SGD": None, "INO-SGD": ow.INO(tail=TAIL)}


@dataclass(frozen=True)
class Setting:
    """A model of `models.CASES` with owners: budgets evenly from low to high, one for each.

    `seconds` is how long it is measured.
    """

    model: str
    method: str
    low: float
    high: float
    owners: int
    records: int
    seconds: float


SETTINGS = {
    "CIFAR CNN": Setting("cifar", "scale", 0.5, 5.0, 10, 50_000, 120),
    "MNIST CNN": Setting("mnist", "sample", 0.1, 1.0, 2, 60_000, 60),
}


def make_plan(setting: Setting) -> ow.Plan:
    record_owner = np.arange(setting.records) % setting.owners
    owners = ow.Owners(record_owner, np.linspace(setting.low, setting.high, setting.owners), 1e-5)
    batch = CASES[setting.model].batch
    return ow.plan(owners, setting.method, steps=10_000, batch_size=batch, clip_norm=1.0)


def private_step(setting: Setting, plan: ow.Plan, weights: ow.INO | None) -> Step:
    """The step on one batch of the expected size, drawn once with the plan's rates."""
    model, x, y = build(setting.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    step = ow.PrivateStep(model, plan, optimizer, functional.cross_entropy, weights=weights)
    indices, owner_index = np.arange(len(x)), owners_of_batch(plan, len(x))
    return lambda: step(ow.Batch(step.steps_spent, indices, owner_index, (x, y)))


def owners_of_batch(plan: ow.Plan, batch: int) -> np.ndarray:
    shares = plan.sampling_rates / plan.sampling_rates.sum()
    return np.random.default_rng(0).choice(len(shares), batch, p=shares)


def seconds_of_weights(plan: ow.Plan, batch: int, calls: int = 1000) -> float:
    """The processor's seconds of scores and weights of a batch alone, a median."""
    weights = ow.INO(tail=TAIL).bind(plan)
    owner_index = owners_of_batch(plan, batch)
    losses = np.random.default_rng(1).exponential(size=batch)
    times = []
    for _ in range(calls):
        begin = time.process_time()
        weights.weights(weights.score(losses, owner_index), plan.clip_norms[owner_index])
        times.append(time.process_time() - begin)
    return float(np.median(times))


def seconds_per_step(steps: dict[str, Step], seconds: float) -> dict[str, np.ndarray]:
    """The processor's seconds a step in every turn of each; who begins changes by round."""
    begin = time.process_time()
    for step in steps.values():
        step()
    each = (time.process_time() - begin) / len(steps)
    count = max(1, round(TURN / each))
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps.items())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in order:
            begin = time.process_time()
            for _ in range(count):
                step()
            found[name].append((time.process_time() - begin) / count)
        order.reverse()
    return {name: np.array(times) for name, times in found.items()}


def interval(before: np.ndarray, after: np.ndarray, draws: int = 2000) -> str:
    rounds = np.random.default_rng(0).integers(len(before), size=(draws, len(before)))
    ratios = np.median(after[rounds], axis=1) / np.median(before[rounds], axis=1)
    return "{:.3f} to {:.3f}".format(*np.quantile(ratios, (0.025, 0.975)))


def row(name: str, setting: Setting, seconds: float, swap: bool) -> str:
    plan = make_plan(setting)
    order = reversed(CONTENDERS) if swap else CONTENDERS  # what is made later lies elsewhere
    steps = {key: private_step(setting, plan, CONTENDERS[key]) for key in order}
    for step in steps.values():
        step()  # the first one sets up kernels
    found = seconds_per_step(steps, seconds)
    before, after = (found[key] for key in CONTENDERS)
    medians = np.median(before), np.median(after)
    batch = CASES[setting.model].batch
    weighing = seconds_of_weights(plan, batch)
    cells = [
        f"{name}, batch {batch}, {setting.owners} owners, {setting.method}",
        *(f"{1e3 * median:.1f}" for median in medians),
        f"{medians[1] / medians[0]:.3f} ({interval(before, after)})",
        f"{after.min() / before.min():.3f}",
        f"{1e3 * weighing:.2f} ({weighing / medians[0]:.3%})",
        *(f"{median * setting.records / batch:.1f}" for median in medians),
        f"{len(before)}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--swap", action="store_true", help="make INO-SGD's step first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    header = ["", "IDP-SGD, ms", "INO-SGD, ms", "ratio of medians", "of fastest turns"]
    header += ["weights alone, ms", "epoch of IDP-SGD, s", "of INO-SGD, s", "turns of each"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name, setting in SETTINGS.items():
        seconds = setting.seconds / 10 if arguments.quick else setting.seconds
        print(row(name, setting, seconds, arguments.swap), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
