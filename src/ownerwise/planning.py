"""`plan`: from budgets to a verified Plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np

from ownerwise.accounting import ACCOUNTANTS, Schedule
from ownerwise.errors import PlanError
from ownerwise.owners import Owners
from ownerwise.planners import MAX_STEPS, METHODS, Planner
from ownerwise.plans import Plan


def plan(
    owners: Owners,
    method: str = "sample",
    *,
    steps: int | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    mixture: float | None = None,
    noise_schedule: Iterable[tuple[int, float]] | None = None,
    release_std: float | None = None,
    accountant: str = "pld",
    strict: bool = False,
) -> Plan:
    """Return the verified Plan in which every owner spends its own budget.

    Of `steps`, `batch_size` (expected number of records per step) and `noise_multiplier` (noise
    std over `clip_norm`) give two; the third is found.

    Args:
        owners: who owns how many records, with which budgets.
        method: `uniform`: one rate and one clip norm, noise for the strictest owner (DP-SGD).
            `sample`: own rates, one clip norm. `scale`: one rate, own clip norms whose average
            over records is `clip_norm`. `both`: clip norms as in scale to the power `mixture`,
            and own rates for the rest.
        steps: number of steps.
        batch_size: expected batch; the divisor of the private step.
        noise_multiplier: noise std of the sum, over `clip_norm`.
        clip_norm: bound on a record's gradient (the average over records if they differ).
        mixture: for `both`: 0 is sample, 1 is scale; default 0.5.
        noise_schedule: segments (number of steps, noise factor) adding up to `steps`.
        release_std: noise std of a further sum released in every step (a histogram, counts) to
            which each record adds a vector of length at most 1; accounted jointly.
        accountant: `pld` (tight) or `rdp`.
        strict: refuse plans in which some owner cannot use up its budget.
    """
    segments = None if noise_schedule is None else tuple(noise_schedule)
    if segments is not None and steps is None:
        steps = sum(int(count) for count, _ in segments)
    problems = request_problems(
        owners.total_records,
        method=method,
        steps=steps,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        mixture=mixture,
        accountant=accountant,
        release_std=release_std,
        segments=segments,
    )
    if problems:
        raise PlanError(problems)
    mixture = (0.5 if mixture is None else mixture) if method == "both" else None
    planner = Planner(owners, method, mixture, accountant, release_std)
    if steps is None:
        assert batch_size is not None
        assert noise_multiplier is not None
        steps, solution = planner.find_steps(batch_size, noise_multiplier)
        schedule = Schedule.constant(steps)
    else:
        schedule = Schedule.constant(steps) if segments is None else Schedule(segments)
        if noise_multiplier is None:
            assert batch_size is not None
            solution = planner.find_noise(schedule, batch_size)
        else:
            solution = planner.find_batch(schedule, noise_multiplier)
            batch_size = float(solution.rates @ owners.records)
    assert batch_size is not None
    made = Plan(
        method=method,
        accountant=accountant,
        clip_norm=float(clip_norm),
        noise_std=float(solution.noise * clip_norm),
        schedule=schedule,
        expected_batch_size=float(batch_size),
        sampling_rates=solution.rates,
        clip_norms=solution.relative_clips * clip_norm,
        targets=owners.epsilon,
        deltas=owners.delta,
        records=owners.records,
        owners_fingerprint=owners.fingerprint,
        mixture=mixture,
        release_std=None if release_std is None else float(release_std),
        owners=owners,
    )
    made.verify()
    if strict and made.unspent.any():
        who = np.flatnonzero(made.unspent)
        raise PlanError(
            f"{len(who)} owners cannot use up their budget, the first is owner "
            f"{owners.ids[who[0]]} (epsilon {owners.epsilon[who[0]]:g}): its sampling rate would "
            "exceed 1. Use more steps, a smaller batch, method='scale', or strict=False"
        )
    return made


def request_problems(
    total_records: int | None,
    *,
    method: str,
    steps: int | None,
    batch_size: float | None,
    noise_multiplier: float | None,
    clip_norm: float,
    mixture: float | None,
    accountant: str,
    release_std: float | None = None,
    segments: tuple[tuple[int, float], ...] | None = None,
) -> list[str]:
    """Return everything wrong with the arguments of `plan` (records unknown: None)."""
    problems = []
    for what, given, known in (
        ("method", method, METHODS),
        ("accountant", accountant, ACCOUNTANTS),
    ):
        if given not in known:
            near = difflib.get_close_matches(str(given), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{what} {given!r}: expected one of {', '.join(known)}{hint}")
    given = sum(value is not None for value in (steps, batch_size, noise_multiplier))
    if given != 2:
        problems.append(
            f"{given} of steps, batch_size and noise_multiplier were given; expected two (the "
            "budgets decide the third)"
        )
    if steps is not None and not (steps == int(steps) and 1 <= steps <= MAX_STEPS):
        problems.append(f"steps {steps}: expected a whole number from 1 to {MAX_STEPS}")
    most = float("inf") if total_records is None else total_records
    if batch_size is not None and not 0 < batch_size <= most:
        problems.append(
            f"batch_size {batch_size:g}: expected more than 0 and at most the {most:g} declared "
            "records"
        )
    positive = {
        "clip_norm": clip_norm,
        "noise_multiplier": noise_multiplier,
        "release_std": release_std,
    }
    for what, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{what} {value}: expected a positive finite number")
    if mixture is not None and method != "both":
        problems.append(f"mixture {mixture}: only method='both' has a mixture")
    elif mixture is not None and not 0 <= mixture <= 1:
        problems.append(f"mixture {mixture}: expected 0 (sample) to 1 (scale)")
    if segments is not None:
        total_steps = sum(int(count) for count, _ in segments)
        if steps is not None and total_steps != steps:
            problems.append(f"noise_schedule has {total_steps} steps; expected steps={steps}")
    return problems
