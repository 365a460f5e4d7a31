"""`plan`: from budgets to a verified Plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from ownerwise.accounting import ACCOUNTANTS, NOISES, PaidRelease, Schedule
from ownerwise.errors import PlanError, known_names
from ownerwise.owners import (
    Owners,
)
from ownerwise.planning.noise_schedules import NoiseSchedule, schedule_problems, segments
from ownerwise.planning.plans import Plan
from ownerwise.planning.solver import MAX_STEPS, METHODS, MIN_CLIP_NORM, Planner

NO_CONSTRAINTS = "constraints={!r}: expected RateConstraints(...) of them"


@runtime_checkable
class PaidMechanism(Protocol):
    """A mechanism whose release in every step the plan pays for, such as rate constraints.

    Attributes:
        release_share: the share of a step's cost that its release takes, unless stated otherwise.
    """

    release_share: float


def plan(
    owners: Owners,
    method: str = "sample",
    *,
    steps: int | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    mixture: float | None = None,
    noise_schedule: NoiseSchedule | None = None,
    release_std: float | None = None,
    release_share: float | None = None,
    release_noise: str = "gaussian",
    constraints: PaidMechanism | None = None,
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
        noise_schedule: how the noise changes over the steps: "constant", "exponential", "time",
            "step" or "polynomial"; with options, {"name": "exponential", "rate": 0.02, "every":
            117}; or segments (number of steps, noise factor) adding up to `steps`. The noise that
            is found or given is that of factor 1, the start.
        release_std: noise std of a further sum released in every step (a histogram, counts) to
            which each record adds a vector of length at most 1; accounted jointly.
        release_share: instead of its noise, the share of a step's cost that the release takes: of
            the squared inverse multiplier of the strictest owner.
        release_noise: "gaussian", or "laplace" (for vectors whose absolute values add up to at most
            1; needs `pld`).
        constraints: pays for the histogram of rate constraints, a release with `release_share` 0.1
            if neither that nor `release_std` is given. Owners who are drawn more often add less to
            it, so that it counts all records alike.
        accountant: `pld` (tight) or `rdp`.
        strict: refuse plans in which some owner cannot use up its budget.
    """
    named = isinstance(noise_schedule, str | Mapping)
    pieces = None if noise_schedule is None or named else segments(noise_schedule, steps)
    if pieces is not None and steps is None:
        steps = sum(int(count) for count, _ in pieces)
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
        release_share=release_share,
        release_noise=release_noise,
        segments=pieces,
    )
    if named:
        problems += schedule_problems(noise_schedule, steps)
    if constraints is not None and not isinstance(constraints, PaidMechanism):
        problems.append(NO_CONSTRAINTS.format(constraints))
    if problems:
        raise PlanError(problems)
    if named:
        pieces = segments(noise_schedule, steps)
    mixture = (0.5 if mixture is None else mixture) if method == "both" else None
    schedule = None
    if steps is not None:
        schedule = Schedule.constant(steps) if pieces is None else Schedule(pieces)
    if constraints is not None and release_std is None and release_share is None:
        release_share = constraints.release_share
    if release_share is not None and noise_multiplier is not None:
        release_std = noise_multiplier * ((1 - release_share) / release_share) ** 0.5
    elif release_share is not None:
        assert schedule is not None
        assert batch_size is not None
        alone = Planner(owners, method, mixture, accountant).find_noise(schedule, batch_size)
        strictest = alone.noise / float(alone.relative_clips.min())  # its multiplier, all in all
        release_std = strictest / release_share**0.5
    release = None if release_std is None else PaidRelease(float(release_std), release_noise)
    reweighted = constraints is not None and method in ("sample", "both")
    planner = Planner(owners, method, mixture, accountant, release, reweighted)
    if schedule is None:
        assert batch_size is not None
        assert noise_multiplier is not None
        steps, solution = planner.find_steps(batch_size, noise_multiplier)
        schedule = Schedule.constant(steps)
    elif noise_multiplier is None:
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
        release_std=None if release is None else release.std,
        release_noise=release_noise,
        release_shares=solution.rates.min() / solution.rates if reweighted else None,
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
    release_share: float | None = None,
    release_noise: str = "gaussian",
    segments: tuple[tuple[int, float], ...] | None = None,
) -> list[str]:
    """Return everything wrong with the arguments of `plan` (records unknown: None)."""
    problems = []
    for what, given, known in (
        ("method", method, METHODS),
        ("accountant", accountant, ACCOUNTANTS),
        ("release_noise", release_noise, NOISES),
    ):
        if given not in known:
            problems.append(f"no {what} {given!r}; {known_names(given, known)}")
    given = sum(value is not None for value in (steps, batch_size, noise_multiplier))
    if given != 2:
        problems.append(
            f"{given} of steps, batch_size and noise_multiplier were given; expected two (the "
            "budgets decide the third)"
        )
    whole = isinstance(steps, int | float | np.number) and steps == np.floor(steps)
    if steps is not None and not (whole and 1 <= steps <= MAX_STEPS):
        problems.append(f"steps {steps!r}: expected a whole number from 1 to {MAX_STEPS}")
    most = float("inf") if total_records is None else total_records
    if batch_size is not None and not (_is_number(batch_size) and 0 < batch_size <= most):
        limit = "" if total_records is None else f" and at most the {most:g} declared records"
        given = f"{batch_size:g}" if _is_number(batch_size) else repr(batch_size)
        problems.append(f"batch_size {given}: expected a number above 0{limit}")
    if not (_is_number(clip_norm) and MIN_CLIP_NORM <= clip_norm <= 1 / MIN_CLIP_NORM):
        problems.append(
            f"clip_norm {clip_norm!r}: expected {MIN_CLIP_NORM:g} to {1 / MIN_CLIP_NORM:g}, whose "
            "squares float32 can hold"
        )
    positive = {
        "noise_multiplier": noise_multiplier,
        "release_std": release_std,
    }
    for what, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{what} {value}: expected a positive finite number")
    if release_share is not None and not 0 < release_share < 1:
        problems.append(f"release_share {release_share}: expected more than 0 and less than 1")
    if release_share is not None and release_std is not None:
        problems.append("release_share and release_std were both given; expected one of them")
    if release_noise == "laplace" and accountant != "pld":
        problems.append(
            f"release_noise 'laplace' with accountant {accountant!r}: expected 'pld', the one that "
            "accounts for it"
        )
    if mixture is not None and method != "both":
        problems.append(f"mixture {mixture}: only method='both' has a mixture")
    elif mixture is not None and not 0 <= mixture <= 1:
        problems.append(f"mixture {mixture}: expected 0 (sample) to 1 (scale)")
    if segments is not None:
        total_steps = sum(int(count) for count, _ in segments)
        if steps is not None and total_steps != steps:
            problems.append(f"noise_schedule has {total_steps} steps; expected steps={steps}")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
