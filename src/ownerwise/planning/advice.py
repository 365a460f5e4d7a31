"""Advice on a plan: the noise and the signal that given budgets allow, over steps and batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from ownerwise.accounting import Schedule
from ownerwise.errors import PlanError
from ownerwise.owners import Owners
from ownerwise.planning import individual
from ownerwise.planning.making import planner_for
from ownerwise.planning.request import PlanRequest
from ownerwise.planning.solver import Planner
from ownerwise.planning.usefulness import LEAST_SIGNAL, signal_to_noise

STEPS = (100, 300, 1000, 3000, 10_000)
"""Numbers of steps; fewer than 100 rarely train a network, whatever the noise."""
SHARES = (0.01, 0.03, 0.1, 0.3)
"""Expected batch sizes, as fractions of all records (or owners)."""
_ENOUGH = 0.8  # of the largest signal in the table


@dataclass(frozen=True)
class Combination:
    """One combination of steps and batch size: its noise multiplier and its signal.

    Both are None if the budgets do not allow the combination.
    """

    steps: int
    batch_size: float
    noise_multiplier: float | None
    signal: float | None


@dataclass(frozen=True)
class Advice:
    """What the budgets allow with one method.

    Attributes:
        method: the planning method.
        drawn: "records" or "owners".
        total: how many there are.
        cells: one row per batch size, one column per number of steps.
        best: the cell with the least work (steps times batch) among those with most of the largest
            signal; None if no cell is possible.
        others: the signal of the best cell, if something else were different.
    """

    method: str
    drawn: str
    total: int
    cells: tuple[tuple[Combination, ...], ...]
    best: Combination | None
    others: dict[str, float]

    @property
    def useless(self) -> bool:
        """Whether no combination is of use."""
        return self.best is None or (self.best.signal or 0) < LEAST_SIGNAL


def advise(owners: Owners, request: PlanRequest) -> Advice:
    """Return the noise and signal for several numbers of steps and batch sizes.

    Args:
        owners: the owners, with their budgets and records, which are public.
        request: the other settings of the plan; its steps, batch size and noise are not used.
    """
    if request.method == individual.METHOD:
        raise PlanError(individual.NO_ADVICE)
    total = int(request.elements_of_holders(owners).sum())
    request = replace(request, steps=None, epochs=None, batch_size=None, noise_multiplier=None)
    cells = tuple(
        _row(owners, request, max(1.0, round(share * total)))
        for share in SHARES
        if share == SHARES[-1] or share * total >= 1
    )
    possible = [cell for row in cells for cell in row if cell.signal is not None]
    best = None
    if possible:
        most = max(cell.signal or 0.0 for cell in possible)
        good = [cell for cell in possible if (cell.signal or 0.0) >= _ENOUGH * most]
        best = min(good, key=lambda cell: (cell.steps * cell.batch_size, -(cell.signal or 0.0)))
    others = {} if best is None else _others(owners, request, best)
    drawn = "owners" if request.sampling == "owner" else "records"
    return Advice(request.method, drawn, total, cells, best, others)


def _row(owners: Owners, request: PlanRequest, batch_size: float) -> tuple[Combination, ...]:
    planner = planner_for(owners, request)
    return tuple(_cell(planner, steps, batch_size) for steps in STEPS)


def _cell(planner: Planner, steps: int, batch_size: float) -> Combination:
    try:
        found = planner.find_noise(Schedule.constant(steps), batch_size)
    except PlanError:
        return Combination(steps, batch_size, None, None)
    clip_norms_drawn = planner.batch_size(found.sampling_rates * found.relative_clips)
    signal = signal_to_noise(clip_norms_drawn, steps, found.noise)
    return Combination(steps, batch_size, float(found.noise), float(signal))


def _others(owners: Owners, request: PlanRequest, best: Combination) -> dict[str, float]:
    """Return the signal of the best cell with larger budgets, more records or another method."""
    assert best.signal is not None
    doubled = copy.copy(owners)
    vars(doubled)["epsilon"] = 2 * owners.epsilon
    ways = {"all budgets doubled": (doubled, request)}
    for method in ("uniform", "sample", "scale"):
        if method != request.method:
            ways[f"method {method}"] = owners, replace(request, method=method, mixture=None)
    cells = {
        name: _cell(planner_for(whose, asked), best.steps, best.batch_size)
        for name, (whose, asked) in ways.items()
    }
    # at the same rates, twice the records add twice the gradients under the same noise
    found = {f"twice the {'owners' if request.sampling == 'owner' else 'records'}": 2 * best.signal}
    return found | {name: cell.signal for name, cell in cells.items() if cell.signal is not None}
