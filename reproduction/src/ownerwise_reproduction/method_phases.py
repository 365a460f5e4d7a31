"""What methods make of a population: the trainings that a run consists of.

Accounting of groups of owners one after another, each by DP-SGD at the lowest budget within it: a
record takes part in the phase of its own group alone. Before that phase nothing depends on it;
after it, the later phases take the model, which is an output, and other records, so they are
post-processing for this record. Hence it spends what its own phase spends, and every phase is
planned for the full budget of its group. That needs groups which are public and made from budgets,
never from contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise_reproduction.population import Population

MOST_TIERS = 10
"""Groups that `one_after_another` makes of the budgets, at most."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One training phase of a run; most methods have one."""

    population: Population
    plan: Mapping[str, Any]


def all_at_once(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """One training on everybody's records."""
    return [Phase(population, plan)]


def at_the_laxest(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """One training at the laxest budget: NOT within the budgets."""
    laxest = np.full(len(population), population.epsilon.max())
    return [Phase(population.with_budgets(laxest), plan)]


def lax_alone(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """One training without the strict owners."""
    return [_fitting(population.keep(population.lax), plan)]


def fewer_lax(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Drop a share of the lax owners' records, drawn without looking at them."""
    generator = np.random.default_rng(seed)
    kept = np.ones(len(population), dtype=bool)
    lax = np.flatnonzero(population.lax)
    kept[generator.choice(lax, round(float(argument) * len(lax)), replace=False)] = False
    return [_fitting(population.keep(kept), plan)]


def lowered(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Move every budget a share of its way down to the strictest: 0 is IDP-SGD, 1 is DP-SGD."""
    strictest = population.epsilon.min()
    lowered = population.epsilon - float(argument) * (population.epsilon - strictest)
    return [Phase(population.with_budgets(lowered), plan)]


def one_after_another(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train on tiers of budgets in turn; steps are shared out by numbers of records."""
    tier = tiers(population.epsilon)
    parts = [population.keep(tier == number) for number in range(tier.max() + 1)]
    phases = []
    for part in parts if argument == "strict-first" else reversed(parts):
        lowest = np.full(len(part), part.epsilon.min())
        steps = max(1, round(plan["steps"] * len(part) / len(population)))
        phases.append(_fitting(part.with_budgets(lowest), {**plan, "steps": steps}))
    return phases


def tiers(epsilon: np.ndarray) -> np.ndarray:
    """Return the tier of each record, 0 the strictest: the budgets there are, or ten like-sized."""
    budgets, index, counts = np.unique(epsilon, return_inverse=True, return_counts=True)
    if len(budgets) <= MOST_TIERS:
        return index
    below = np.cumsum(counts) - counts  # records with a stricter budget
    tier = below * MOST_TIERS // len(epsilon)
    return np.unique(tier, return_inverse=True)[1][index]


def _fitting(population: Population, plan: Mapping[str, Any]) -> Phase:
    """Return a phase whose batch is at most half of the records that are left."""
    return Phase(population, {**plan, "batch_size": min(plan["batch_size"], len(population) / 2)})
