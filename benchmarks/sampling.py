"""Measure the time for a Poisson batch and for a step's noise, in milliseconds per step.

Run: python benchmarks/sampling.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from ownerwise.batches import (
    PoissonBatches,
)
from ownerwise.batches.sampler import PoissonSampler
from ownerwise.randomness import (
    Noise,
    SecretStream,
    grid_of,
)

BATCH = 512
CIFAR_CNN_PARAMETERS = 550_570
REPEATS = 100


def milliseconds(call: Callable[[int], object], repeats: int = REPEATS) -> str:
    times = []
    for step in range(repeats):
        begin = time.perf_counter()
        call(step)
        times.append(1e3 * (time.perf_counter() - begin))
    return f"minimum {min(times):8.3f}   median {np.median(times):8.3f}"


def shared_rates(records: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    owner = (np.arange(records) * 7919) % classes
    rates = np.arange(1.0, classes + 1)
    return rates * BATCH / rates[owner].sum(), owner


def own_rates(records: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rates that are log-uniform over three decades."""
    rates = 10.0 ** np.linspace(0, 3, records)
    return rates * BATCH / rates.sum(), np.arange(records)


def sampler(title: str, rates: np.ndarray, owner: np.ndarray) -> None:
    begin = time.perf_counter()
    made = PoissonSampler(rates, owner)
    setup = time.perf_counter() - begin
    stream = SecretStream().child("sampling")
    figures = milliseconds(lambda step: made.draw(stream.at_step(step)))
    print(f"{title:<58}{figures}   set-up {setup:.2f} s")


def batches(title: str, rates: np.ndarray, owner: np.ndarray, width: int) -> None:
    owners = SimpleNamespace(record_owner_index=owner)
    plan = SimpleNamespace(owners=owners, sampling_rates=rates, steps=REPEATS)
    data = torch.ones(len(owner), width), torch.ones(len(owner), dtype=torch.int64)
    iterator = iter(PoissonBatches(data, plan))
    print(f"{title:<58}{milliseconds(lambda _: next(iterator))}")


def noise(title: str) -> None:
    source = Noise()
    sums = [torch.zeros(CIFAR_CNN_PARAMETERS)]
    grid = grid_of(1.0)
    print(f"{title:<58}{milliseconds(lambda step: source.gaussian(step, sums, 1.0, grid))}")


def main() -> None:
    print(f"expected batch {BATCH}, {torch.get_num_threads()} threads, milliseconds per step")
    sampler("draw: 10^7 records, 3 rates", *shared_rates(10**7, 3))
    sampler("draw: 10^7 records, 1,000 rates", *shared_rates(10**7, 1000))
    sampler("draw: 10^6 records, each with its own rate", *own_rates(10**6))
    sampler("draw: 10^7 records, each with its own rate", *own_rates(10**7))
    batches("batch with rows: 10^7 records of 16 numbers, 3 rates", *shared_rates(10**7, 3), 16)
    noise(f"noised sum of {CIFAR_CNN_PARAMETERS} numbers")


if __name__ == "__main__":
    main()
