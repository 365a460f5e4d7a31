"""Plans for the candidates of a search, each run so cheap that the whole search fits the budgets.

A run of a search is planned as an ordinary run with smaller budgets. They are found by iteration:
all candidates are planned, the cost of the search is computed for every level of budgets, and each
level's budget for a run is corrected by what it missed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ownerwise.accounting import RunLaw
from ownerwise.errors import PlanError, Problems
from ownerwise.owners import Owners
from ownerwise.planning import individual
from ownerwise.planning.making import solved_plan, with_rows
from ownerwise.planning.plans import Plan
from ownerwise.planning.request import PlanRequest
from ownerwise.planning.tuning import Rival, Tuning, tail_probability

MOST_LEVELS = 48
"""With more distinct budgets than this, budgets are rounded down to this many levels."""

_AIM, _LEAST = 0.995, 0.98  # of a budget: aimed at, and good enough
_MOST = 0.9985  # dp-accounting's grid of orders is coarser
_ROUNDS = 20
_TINIEST = 0.05  # a run with less of a budget cannot train anything


def tuned_plans(
    owners: Owners,
    requests: Sequence[PlanRequest],
    law: RunLaw,
    *,
    always_run: bool = False,
    score_std: float | None = None,
    score_records: int = 1,
) -> list[Plan]:
    """Return a verified plan for each request, whose epsilons are those of the whole search.

    Args:
        owners: the owners, with the budgets for the whole search.
        requests: one request per candidate.
        law: the law of the number of runs.
        always_run: always make so many runs that more are as unlikely as delta requires.
        score_std: std of the noise on the score of a run, of sensitivity 1; None if it is public.
        score_records: the largest number of an owner's validation records.
    """
    problems = Problems()
    distinct = {repr(request): request for request in requests}
    for request in distinct.values():
        problems.add(*_request_problems(owners, request))
    for name in ("unit", "sampling", "hardened"):
        values = {str(getattr(request, name)) for request in requests}
        if len(values) > 1:
            problems.add(
                f"{name} differs between candidates ({', '.join(sorted(values))}); expected the "
                "same for all, because they are accounted for together"
            )
    problems.raise_(PlanError)
    probability = tail_probability(owners.epsilon, owners.delta)
    most = law.most(probability) if always_run else None
    levels, deltas = _levels(owners)
    _, index = np.unique(np.stack([levels, deltas]), axis=1, return_inverse=True)
    index = index.reshape(-1)
    first = np.unique(index, return_index=True)[1]
    log_budget = np.log(levels[first]) - 0.5 * np.log(1 + law.mean) ** 0.5
    previous: tuple[np.ndarray, np.ndarray] | None = None
    for _ in range(_ROUNDS):
        epsilon = np.exp(log_budget)[index]
        one_run = _with_budgets(owners, epsilon, deltas)
        solved = {name: solved_plan(one_run, request) for name, request in distinct.items()}
        plans = [solved[repr(request)] for request in requests]
        tuning = Tuning(law, _distinct(plans), most, score_std, score_records)
        plans = [_of_search(plan, owners, tuning) for plan in plans]
        spent = _largest(plans[0].epsilon() / levels, index, len(first))
        if spent.max() <= _MOST and (
            spent.min() >= _LEAST or (previous is not None and _settled(spent, previous[1]))
        ):
            for plan in dict.fromkeys(plans):
                plan.verify()
            return plans
        miss = np.log(spent / _AIM)
        slope = np.ones(len(miss))
        if previous is not None:
            moved = log_budget - previous[0]
            with np.errstate(divide="ignore", invalid="ignore"):
                slope = np.log(spent / previous[1]) / moved
            slope = np.where(np.isfinite(slope), np.clip(slope, 0.3, 3.0), 1.0)
        previous = log_budget, spent
        stuck = np.flatnonzero((spent > 1) & (log_budget < np.log(_TINIEST * levels[first])))
        if len(stuck):
            raise PlanError(_too_strict(plans[0], law, levels[first][stuck], spent[stuck]))
        log_budget = log_budget - np.clip(miss / slope, -1.5, 1.5)
    raise PlanError(f"no plan for the search was found in {_ROUNDS} rounds: use fewer candidates")


def _too_strict(plan: Plan, law: RunLaw, levels: np.ndarray, spent: np.ndarray) -> str:
    worst = int(spent.argmax())
    return (
        f"a search of {law.mean:g} expected runs ({law.name} law) would cost {spent[worst]:.3g} "
        f"times the budget of an owner with epsilon {levels[worst]:g}, however little each run "
        f"spends: with noise multiplier {plan.noise_multipliers.min():.3g}, such a budget cannot "
        "pay for a choice among runs. Use a larger batch or more steps (for more noise), "
        "method='scale' or 'uniform', fewer expected runs, larger budgets, or tune on public data"
    )


def _request_problems(owners: Owners, request: PlanRequest) -> list[str]:
    resolved = request.resolved(int(request.elements_of_holders(owners).sum()))
    problems = resolved.problems(int(request.elements_of_holders(owners).sum()))
    if request.noise_multiplier is not None:
        problems.append(
            f"noise_multiplier {request.noise_multiplier!r} in a search: expected steps (or "
            "epochs) and batch_size, because the noise follows from the budgets of the search"
        )
    if request.method == individual.METHOD:
        problems.append(
            f"method {request.method!r} in a search: expected another method, because individual "
            "accounting keeps private spends for one run"
        )
    if request.release_noise == "laplace":
        problems.append(
            "release_noise 'laplace' in a search: expected 'gaussian', because a search is "
            "accounted for with Renyi divergences"
        )
    return problems


def _levels(owners: Owners) -> tuple[np.ndarray, np.ndarray]:
    """Return epsilon and delta of every owner, rounded down to few distinct pairs."""
    epsilon, delta = owners.epsilon, owners.delta
    if len(np.unique(np.stack([epsilon, delta]), axis=1).T) <= MOST_LEVELS:
        return epsilon, delta
    delta = _down(delta, 4)
    return _down(epsilon, MOST_LEVELS // len(np.unique(delta))), delta


def _down(values: np.ndarray, most: int) -> np.ndarray:
    distinct = np.unique(values)
    if len(distinct) <= most:
        return values
    grid = np.geomspace(distinct[0], distinct[-1], most)
    grid[0], grid[-1] = distinct[0], distinct[-1]
    return np.minimum(values, grid[np.searchsorted(grid, values, side="right") - 1])


def _with_budgets(owners: Owners, epsilon: np.ndarray, delta: np.ndarray) -> Owners:
    other = copy.copy(owners)
    other._set(epsilon=epsilon, delta=delta)
    return other


def _distinct(plans: Sequence[Plan]) -> tuple[Rival, ...]:
    found: list[Rival] = []
    for plan in plans:
        if not any(map(plan.rival.same_as, found)):
            found.append(plan.rival)
    return tuple(found)


def _of_search(plan: Plan, owners: Owners, tuning: Tuning) -> Plan:
    plan = replace(plan, targets=owners.epsilon, deltas=owners.delta, owners=owners, tuning=tuning)
    if plan.hardened_rows is None:
        return plan
    return with_rows(plan, plan.overflow_probability)


def _largest(values: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    result = np.zeros(count)
    np.maximum.at(result, index, values)
    return result


def _settled(spent: np.ndarray, before: np.ndarray) -> bool:
    """Return whether the levels that are not used up have stopped moving."""
    left = spent < _LEAST
    return bool((np.abs(spent / before - 1)[left] < 1e-3).all())
