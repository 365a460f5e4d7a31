"""What each protection adds to the private step of IDP-SGD, and what INO adds.

    python benchmarks/costs.py                       # about ten minutes
    python benchmarks/costs.py --quick --models mlp

All variants of a model's step are interleaved in one process with one thread, so noise on the
machine affects all of them. Times are CPU times, which exclude waiting for a core. The figures
compare medians, with a 95% bootstrap interval over rounds; the last column compares the fastest
turns. Variants:

- idp: the reference, `PrivateStep` with standard clipping
- ino: with INO's weights
- own loss: with a user-defined loss, which the step checks for mixing (torch's need no check)
- unchecked: the same without the check
- plain noise: float32 noise from torch's generator, without a grid (NOT private)
- hardened: a hardened plan, whose batches have a fixed number of rows
- hardened ino: both
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ownerwise as ow
from models import CASES, build
from ownerwise.step import separation

RATE, TURN, TAIL = 0.01, 0.1, 0.4
OFF_SIZE = 5  # the size of a Poisson batch is rarely a multiple of the block size
STEPS = 10_000
Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """A model of `models.CASES`, and owners whose budgets are evenly spaced from low to high."""

    method: str
    low: float
    high: float
    owners: int
    records: int
    seconds: float


SETTINGS = {
    "mlp": Setting("sample", 0.5, 5.0, 10, 60_000, 60),
    "mnist": Setting("sample", 0.1, 1.0, 2, 60_000, 180),
    "cifar": Setting("scale", 0.5, 5.0, 10, 50_000, 300),
}
VARIANTS = ("idp", "ino", "own loss", "unchecked", "plain noise", "hardened", "hardened ino")


def make_plan(name: str, *, hardened: bool) -> ow.Plan:
    setting = SETTINGS[name]
    record_owner = np.arange(setting.records) % setting.owners
    owners = ow.Owners(record_owner, np.linspace(setting.low, setting.high, setting.owners), 1e-5)
    return ow.plan(
        owners,
        setting.method,
        steps=STEPS,
        batch_size=CASES[name].batch,
        clip_norm=1.0,
        hardened=hardened,
    )


def make_step(name: str, plan: ow.Plan, variant: str) -> Step:
    """Return the step on one batch of the expected size, drawn once at the plan's rates."""
    model, x, y = build(name)
    x, y = x[:-OFF_SIZE], y[:-OFF_SIZE]
    weights = ow.INO(tail=TAIL) if variant.endswith("ino") else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss = own_loss if variant in ("own loss", "unchecked") else functional.cross_entropy
    step = ow.PrivateStep(model, plan, optimizer, loss, weights=weights)
    if variant == "plain noise":
        step._randomness.noise.gaussian = _plain_noise  # type: ignore[method-assign]
    shares = plan.sampling_rates / plan.sampling_rates.sum()
    owner_index = np.random.default_rng(0).choice(len(shares), len(x), p=shares)
    indices = np.arange(len(x))

    def take() -> None:
        with _checks(active=variant != "unchecked"):
            step(ow.Batch(step.steps_spent, indices, owner_index, (x, y)))

    return take


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def _plain_noise(
    step: int, sums: list[Tensor], std: float, grid: float, factor: float, like: list[Tensor]
) -> list[Tensor]:
    return [torch.randn_like(total).mul_(std).add_(total).mul_(factor) for total in sums]


@contextmanager
def _checks(*, active: bool) -> Iterator[None]:
    before, separation.active = separation.active, active
    try:
        yield
    finally:
        separation.active = before


def seconds_per_step(steps: dict[str, Step], seconds: float) -> dict[str, np.ndarray]:
    """Return the CPU seconds per step in every turn; the order reverses every round."""
    begin = time.process_time()
    for step in steps.values():
        step()
    each = (time.process_time() - begin) / len(steps)
    count = max(1, round(TURN / each))
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps.items())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in order:
            begin = time.process_time()
            for _ in range(count):
                step()
            times[name].append((time.process_time() - begin) / count)
        order.reverse()
    return {name: np.array(turns) for name, turns in times.items()}


def interval(before: np.ndarray, after: np.ndarray, draws: int = 2000) -> str:
    rounds = np.random.default_rng(0).integers(len(before), size=(draws, len(before)))
    ratios = np.median(after[rounds], axis=1) / np.median(before[rounds], axis=1)
    return "{:.3f} to {:.3f}".format(*np.quantile(ratios, (0.025, 0.975)))


def rows(name: str, seconds: float) -> Iterator[str]:
    plans = {hardened: make_plan(name, hardened=hardened) for hardened in (False, True)}
    steps = {
        variant: make_step(name, plans[variant.startswith("hardened")], variant)
        for variant in VARIANTS
    }
    for step in steps.values():
        step()  # the first step sets up kernels
    times = seconds_per_step(steps, seconds)
    base = times["idp"]
    for variant, turns in times.items():
        median = float(np.median(turns))
        cells = [
            f"{name}, batch {CASES[name].batch}",
            variant,
            f"{1e3 * median:.3g}",
            f"{1e6 * (median - float(np.median(base))):+.0f}",
            f"{median / float(np.median(base)):.3f} ({interval(base, turns)})",
            f"{turns.min() / base.min():.3f}",
            f"{len(turns)}",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    header = ["model", "variant", "ms per step", "difference, µs", "ratio of medians"]
    header += ["of fastest turns", "turns"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name in arguments.models.split(","):
        seconds = SETTINGS[name].seconds / (10 if arguments.quick else 1)
        for row in rows(name, seconds):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
