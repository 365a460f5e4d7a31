"""The training phases of a run, and how each method changes the population in them.

The following applies to methods that train on groups of owners one after another, using DP-SGD at
the lowest budget in each group. A record takes part only in the phase of its own group. Nothing
before that phase depends on the record. Later phases use only other records and the model, which
has already been released, so for this record they are post-processing. The record therefore spends
only what its own phase spends, and every phase is planned for the full budget of its group. This
requires the groups to be public and to be formed from the budgets, never from the contents of
records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.planning import plan as make_plan
from ownerwise_reproduction.population import Population

MOST_TIERS = 10
"""Largest number of groups that `one_after_another` forms from the budgets."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One training phase of a run; most methods have only one."""

    population: Population
    plan: Mapping[str, Any]


def all_at_once(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train once, on all records."""
    return [Phase(population, plan)]


def at_the_laxest(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train once with the laxest budget for all owners; this EXCEEDS the other owners' budgets."""
    laxest = np.full(len(population), population.epsilon.max())
    return [Phase(population.with_budgets(laxest), plan)]


def lax_alone(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train once, without the strict owners' records."""
    return [_fitting(population.keep(population.lax), plan)]


def fewer_lax(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Drop a fraction of the lax owners' records at random, independently of their contents."""
    generator = np.random.default_rng(seed)
    kept = np.ones(len(population), dtype=bool)
    lax = np.flatnonzero(population.lax)
    kept[generator.choice(lax, round(float(argument) * len(lax)), replace=False)] = False
    return [_fitting(population.keep(kept), plan)]


def lowered(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Lower every budget by a fraction of its difference from the strictest budget.

    A fraction of 0 is equivalent to IDP-SGD, and a fraction of 1 is equivalent to DP-SGD.
    """
    strictest = population.epsilon.min()
    lowered = population.epsilon - float(argument) * (population.epsilon - strictest)
    return [Phase(population.with_budgets(lowered), plan)]


def at_the_noise_of_dp_sgd(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train once with the noise of DP-SGD; higher budgets buy a "larger-batch" or "more-steps"."""
    size = {name: plan[name] for name in ("steps", "batch_size", "clip_norm")}
    counted = {"accountant": plan["accountant"]} if "accountant" in plan else {}
    strictest = make_plan(population.owners(), "uniform", **size, **counted)
    size.pop("steps" if argument == "more-steps" else "batch_size")
    noise = float(strictest.noise_std / strictest.clip_norm)
    made = make_plan(population.owners(), "sample", **size, **counted, noise_multiplier=noise)
    larger = {"steps": made.steps, "batch_size": made.expected_batch_size}
    return [Phase(population, {**plan, "method": "sample", **larger})]


def one_after_another(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train on one budget tier after another, with steps in proportion to the number of records."""
    tier = tiers(population.epsilon)
    parts = [population.keep(tier == number) for number in range(tier.max() + 1)]
    phases = []
    for part in parts if argument == "strict-first" else reversed(parts):
        lowest = np.full(len(part), part.epsilon.min())
        steps = max(1, round(plan["steps"] * len(part) / len(population)))
        phases.append(_fitting(part.with_budgets(lowest), {**plan, "steps": steps}))
    return phases


def tiers(epsilon: np.ndarray) -> np.ndarray:
    """Return each record's tier, where 0 is the strictest.

    There is one tier per budget or, if there are many budgets, up to ten of about equal size.
    """
    budgets, index, counts = np.unique(epsilon, return_inverse=True, return_counts=True)
    if len(budgets) <= MOST_TIERS:
        return index
    below = np.cumsum(counts) - counts  # records with a stricter budget
    tier = below * MOST_TIERS // len(epsilon)
    return np.unique(tier, return_inverse=True)[1][index]


def _fitting(population: Population, plan: Mapping[str, Any]) -> Phase:
    """Return a phase, with its expected batch size limited to half its number of records."""
    return Phase(population, {**plan, "batch_size": min(plan["batch_size"], len(population) / 2)})
