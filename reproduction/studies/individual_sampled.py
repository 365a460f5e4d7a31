"""Would individual accounting with sampled steps gain anything? A simulation on MNIST.

    python reproduction/studies/individual_sampled.py noise
    python reproduction/studies/individual_sampled.py simulate

A filter for sampled steps must be a Renyi filter at one order, fixed beforehand. In every step it
charges every record, drawn or not, the divergence of a sampled Gaussian step with the length of the
record's own clipped gradient. It therefore needs the gradient norms of all records in every step,
in addition to the step on the drawn ones. This study simulates it with the features and the linear
head of `individual.py`, for which all norms have a closed form. Rows, all with the same epsilon
and the same number of steps:

- `dp-sgd`: the noise that exact accounting (PLD) allows;
- `filter, nobody retires`: the noise that the filter's order allows if every gradient is clipped;
- `filter, 2/3` and `filter, 1/3`: the noise with which clipped records can take this share of the
  steps; a record retires when its own charges reach the limit;
- `full batch` and `full batch, filter, 2/3`: the same, with all records in every step and the GDP
  filter, which is exact there (`method="individual"`). Since the filter for sampled steps needs
  all norms, this costs no more computation.

Each row has the best of several learning rates, chosen on the test records, which favours all rows
alike. The order is the one that needs the least noise; all runs share one seed. `noise` computes
the noise alone. Results are in reproduction/results/individual/sampled.md and sampled-noise.md.
They are simulations, and NOT PRIVATE.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch.nn import functional

import ownerwise as ow
from individual import DELTA, load
from ownerwise.accounting import filter_limits
from ownerwise.accounting.moments import log_moments
from ownerwise.files import write_text

RESULTS = Path(__file__).parents[1] / "results/individual"
NOISE_SETTINGS = ((1000, 400), (6000, 150))
SETTINGS = NOISE_SETTINGS[1:]  # expected batch, steps
RECORDS, EPSILONS = 60_000, (0.3, 2.0)
RATES = (10.0, 30.0)
SHARES = {"filter, nobody retires": 1.0, "filter, 2/3": 2 / 3, "filter, 1/3": 1 / 3}
ORDERS = 1 + np.geomspace(0.5, 400.0, 40)
FULL_SHARE = 2 / 3
LENGTHS = np.linspace(0.0, 1.0, 65)[1:]  # of a gradient, in units of the clip norm


def divergence(rate: float, multiplier: float, orders: np.ndarray) -> np.ndarray:
    """Return the Renyi divergences of a step, the larger one of both directions."""
    moments = [log_moments(rate, multiplier, a) / (orders - 1) for a in (orders, 1 - orders)]
    return np.maximum(*moments)


def limits(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Return the limit on the sum of divergences at every order."""
    return epsilon - np.log1p(-1 / orders) + (math.log(DELTA) + np.log(orders)) / (orders - 1)


def least_noise(rate: float, epsilon: float, clipped_steps: float) -> tuple[float, float]:
    """Return the least noise multiplier with which clipped records can take these steps, and the
    order at which they can.
    """

    def excess(multiplier: float) -> float:
        cost = clipped_steps * divergence(rate, multiplier, ORDERS)
        return float((cost - limits(epsilon, ORDERS)).min())

    multiplier = brentq(excess, 0.4, 1000.0, xtol=1e-4)
    room = limits(epsilon, ORDERS) - clipped_steps * divergence(rate, multiplier, ORDERS)
    return multiplier, float(ORDERS[int(room.argmax())])


def sampled_filter(
    rate: float, multiplier: float, epsilon: float, order: float
) -> tuple[float, np.ndarray]:
    """Return the limit of the Renyi filter of an order, and the costs of all `LENGTHS`."""
    at = np.array([order])
    costs = [divergence(rate, multiplier / one, at)[0] for one in LENGTHS.tolist()]
    return float(limits(epsilon, at)[0]), np.array(costs)


def simulated(
    data: tuple,
    batch: int,
    steps: int,
    multiplier: float,
    rate: float,
    filtered: tuple[float, np.ndarray] | None,
) -> tuple[float, float]:
    """Return the test accuracy and the share of active records after a run.

    Args:
        data: training and test data.
        batch: expected batch.
        steps: number of steps.
        multiplier: noise multiplier.
        rate: learning rate.
        filtered: limit of the filter and the costs of all `LENGTHS`; None if there is none.
    """
    (inputs, targets), (held, truth) = data
    count = len(inputs)
    generator = torch.Generator().manual_seed(0)
    wanted = functional.one_hot(targets, 10).float()
    weights = torch.zeros(inputs.shape[1] + 1, 10)
    inputs = torch.cat([inputs, torch.ones(count, 1)], 1)
    lengths = inputs.norm(dim=1)
    velocity = torch.zeros_like(weights)
    left, cost = torch.full((count,), math.inf), torch.zeros(0)
    if filtered is not None:
        left = torch.full((count,), filtered[0])
        cost = torch.tensor([0.0, *filtered[1]], dtype=torch.float32)
    active = torch.ones(count, dtype=torch.bool)
    for _ in range(steps):
        errors = torch.softmax(inputs @ weights, 1) - wanted
        norms = errors.norm(dim=1) * lengths
        if filtered is not None:
            charges = cost[torch.ceil(norms.clamp(max=1.0) * len(LENGTHS)).long()]
            active &= charges <= left
            left = torch.where(active, left - charges, 0.0)
        drawn = (torch.rand(count, generator=generator) < batch / count) & active
        factors = 1 / norms[drawn].clamp(min=1.0)
        total = inputs[drawn].T @ (errors[drawn] * factors[:, None])
        total += multiplier * torch.randn(weights.shape, generator=generator)
        velocity = 0.9 * velocity + total / batch
        weights -= rate * velocity
    outputs = held @ weights[:-1] + weights[-1]
    accuracy = float((outputs.argmax(1) == truth).double().mean())
    return accuracy, float(active.double().mean())


def exact_noise(epsilon: float, batch: int, steps: int) -> float:
    """Return the noise multiplier of DP-SGD by exact accounting."""
    owners = ow.Owners(np.zeros(RECORDS, dtype=np.int64), {0: epsilon}, DELTA)
    plan = ow.plan(owners, steps=steps, batch_size=batch, method="uniform")
    return float(plan.noise_multipliers[0])


def full_batch_limit(epsilon: float) -> float:
    """Return the limit of the GDP filter."""
    return float(filter_limits("gdp", np.array([epsilon]), np.array([DELTA]))[0])


def noise() -> None:
    """Write how much noise DP-SGD, the filter and full batches need, if nobody retires."""
    lines = [
        "# Noise of sampled steps by exact accounting, by a Renyi filter, and of full batches\n",
        "Standard deviation in units of the clip norm, divided by the expected batch, times 1e4.\n",
        "| epsilon | steps | batch | sampled, exact | sampled, filter | full batch |",
        "|---|---|---|---:|---:|---:|",
    ]
    for batch, steps in NOISE_SETTINGS:
        for epsilon in EPSILONS:
            found = (
                exact_noise(epsilon, batch, steps) / batch,
                least_noise(batch / RECORDS, epsilon, steps)[0] / batch,
                math.sqrt(steps / full_batch_limit(epsilon)) / RECORDS,
            )
            cells = " | ".join(f"{1e4 * one:.2f}" for one in found)
            lines.append(f"| {epsilon:g} | {steps} | {batch} | {cells} |")
    write_text(RESULTS / "sampled-noise.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


def simulate(cache: Path) -> None:
    """Simulate all rows, and write the table."""
    data = load(cache)
    torch.set_num_threads(1)
    count = RECORDS
    assert len(data[0][0]) == count
    lines = [
        "# Individual accounting with sampled steps: a simulation\n",
        "| epsilon | batch, steps | row | noise multiplier | noise / batch, 1e-4 | "
        "test accuracy, % | active |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for batch, steps in SETTINGS:
        for epsilon in EPSILONS:
            rows: dict[str, tuple[int, float, Any]] = {
                "dp-sgd": (batch, exact_noise(epsilon, batch, steps), None)
            }
            for name, share in SHARES.items():
                multiplier, order = least_noise(batch / count, epsilon, share * steps)
                costs = sampled_filter(batch / count, multiplier, epsilon, order)
                rows[name] = batch, multiplier, costs if share < 1 else None
            room = full_batch_limit(epsilon)
            rows["full batch"] = count, math.sqrt(steps / room), None
            multiplier = math.sqrt(FULL_SHARE * steps / room)
            rows["full batch, filter, 2/3"] = count, multiplier, (room, (LENGTHS / multiplier) ** 2)
            for name, (drawn, multiplier, filtered) in rows.items():
                found = [simulated(data, drawn, steps, multiplier, r, filtered) for r in RATES]
                accuracy, active = max(found)
                lines.append(
                    f"| {epsilon:g} | {batch}, {steps} | {name} | {multiplier:.2f} | "
                    f"{1e4 * multiplier / drawn:.2f} | {100 * accuracy:.2f} | {100 * active:.1f}% |"
                )
                print(lines[-1], [round(100 * one[0], 2) for one in found], flush=True)
                write_text(RESULTS / "sampled.md", "\n".join(lines) + "\n")


def main() -> None:
    """Run one part of the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("noise", "simulate"))
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/ownerwise/individual-features.pt"
    )
    options = parser.parse_args()
    if options.part == "noise":
        noise()
    else:
        simulate(options.cache)


if __name__ == "__main__":
    main()
