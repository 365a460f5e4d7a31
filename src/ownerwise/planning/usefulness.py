"""Whether a plan can be of use: how much its steps can teach a model at best, beside their noise.

All figures follow from the plan, which is public. They say nothing about the data: a plan with
enough signal may still train a poor model, but one without it cannot train any.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LEAST_SIGNAL = 10.0
"""Below this signal, a plan is called useless: noise hides even records that agree."""
_MOST_NUMBER_NOISE = 2.0

ADVICE = (
    "larger budgets, more records, or leaving out owners with very small budgets; `ownerwise plan "
    "BUDGETS --advise` shows what these budgets allow"
)


def signal_to_noise(batch_size: float, steps: float, noise_multiplier: float) -> float:
    """Return the largest possible signal of a run, in standard deviations of its noise.

    If all gradients had the length of the clip norm and pointed the same way in every step, the sum
    over all steps would be `batch_size * steps` clip norms long, and the noise in this direction
    would have a standard deviation of `sqrt(steps) * noise_multiplier` clip norms.
    """
    return batch_size * steps**0.5 / noise_multiplier


def signal_of(plan: Any) -> float:
    """Return `signal_to_noise` of a plan, with the average clip norm of what it draws."""
    of = plan.holders
    drawn = of.sampling_rates * of.elements
    sums = float(drawn @ of.clip_norms)  # clip norms drawn per step
    counts, factors = np.array(plan.schedule.segments, dtype=np.float64).T
    variance = float(counts @ np.square(factors)) * plan.noise_std**2
    return sums * plan.steps / variance**0.5 if variance else 0.0


def concerns_about(plan: Any) -> list[str]:
    """Return the reasons why a plan cannot be of use, each with what would help."""
    found, signal = [], signal_of(plan)
    drawn = f"{plan.sampling}s" if plan.sampling == "owner" else "records"
    batch = plan.expected_batch_size
    if signal < LEAST_SIGNAL:
        found.append(
            f"the noise hides what the steps can teach: even if all gradients agreed, all steps "
            f"together would move the model by only {signal:.2g} standard deviations of the noise "
            f"(a useful plan has at least {LEAST_SIGNAL:g}). What helps: {ADVICE}"
        )
    if batch < 1:
        found.append(
            f"a step draws {batch:.2g} {drawn} on average, so most steps add nothing but noise: "
            "use a larger batch_size"
        )
    rarely = int((plan.sampling_rates * plan.elements * plan.steps < 1).sum())
    if rarely and batch >= 1:
        owners = "1 owner is" if rarely == 1 else f"{rarely} owners are"
        found.append(
            f"{owners} expected to take part less than once in the whole run, because their "
            "budgets are very small or they have few records: use more steps, or a larger batch"
        )
    adaptive = plan.adaptive_clip_norm
    if adaptive is not None and batch >= 1:
        noise = max(adaptive.quantile, 1 - adaptive.quantile) * plan.release_std / batch
        if noise > _MOST_NUMBER_NOISE:
            found.append(
                f"the clip norm would follow noise: its number has a standard deviation of "
                f"{noise:.2g} of the batch. Use a larger batch or release_share, or a fixed "
                "clip_norm"
            )
    return found
