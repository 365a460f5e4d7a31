"""`plan`, which turns a request and the owners' budgets into a verified Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from ownerwise.accounting import ACCOUNTANTS, NOISES, PaidRelease, Schedule
from ownerwise.errors import PlanError, known_names
from ownerwise.owners import Owners
from ownerwise.planning.batch_bounds import rows_needed
from ownerwise.planning.noise_schedules import NoiseSchedule, schedule_problems, segments
from ownerwise.planning.plans import Plan
from ownerwise.planning.solver import MAX_STEPS, METHODS, MIN_CLIP_NORM, Planner

NO_CONSTRAINTS = "constraints={!r}: wrap the constraints in RateConstraints(...)"


@runtime_checkable
class PaidMechanism(Protocol):
    """A mechanism that makes a release at every step, for which the plan must account.

    Attributes:
        release_share: default fraction of a step's privacy cost that is spent on the release.
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
    hardened: bool = False,
) -> Plan:
    """Return a verified Plan in which every owner spends their own budget.

    Specify two of `steps`, `batch_size` (expected number of records per step) and
    `noise_multiplier` (noise std divided by `clip_norm`); the third follows from the budgets.

    Args:
        owners: the owners, with their budgets and numbers of records.
        method: `uniform`: one sampling rate and one clip norm, with noise for the strictest owner
            (DP-SGD). `sample`: individual sampling rates, one clip norm. `scale`: one sampling
            rate, individual clip norms whose average over records is `clip_norm`. `both`: the
            clip norms of `scale` raised to the power `mixture`, and individual sampling rates that
            use up the rest of each budget.
        steps: number of steps.
        batch_size: expected batch size; the noised sum is divided by it.
        noise_multiplier: std of the noise on the sum, divided by `clip_norm`.
        clip_norm: bound on a record's gradient norm (the average over records if bounds differ).
        mixture: for `both`, from 0 (sample) to 1 (scale); by default 0.5.
        noise_schedule: how the noise changes over the steps: a name ("constant", "exponential",
            "time", "step" or "polynomial"), a name with options ({"name": "exponential", "rate":
            0.02, "every": 117}), or segments (number of steps, noise factor) that add up to
            `steps`. The noise multiplier, whether given or found, applies where the noise factor is
            1, as it is at the start of named schedules.
        release_std: noise std of an additional sum that is released at every step, such as a
            histogram or counts. Each record contributes a vector of length at most 1; the sum is
            accounted for jointly with the gradient.
        release_share: fraction of a step's privacy cost that is spent on the release; pass either
            this or `release_std`. The cost is the squared inverse noise multiplier of the strictest
            owner.
        release_noise: "gaussian", or "laplace" (for vectors of L1 norm at most 1; needs `pld`).
        constraints: rate constraints whose histogram the plan accounts for. Unless `release_share`
            or `release_std` is given, the release share is 0.1. Records that are drawn more often
            contribute less to the histogram, so all records count equally.
        accountant: `pld` (tight) or `rdp`.
        strict: refuse plans in which some owner cannot use up their budget.
        hardened: compute every batch with the same public number of rows, and place the records in
            secret random rows. Then no record changes a single bit of what is computed for another
            record, at the cost of computing empty rows (docs/proofs/arithmetic.md).
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
        planner = Planner(owners, method, mixture, accountant, hardened=hardened)
        alone = planner.find_noise(schedule, batch_size)
        strictest = alone.noise / float(alone.relative_clips.min())  # multiplier of a whole step
        release_std = strictest / release_share**0.5
    release = None if release_std is None else PaidRelease(float(release_std), release_noise)
    reweighted = constraints is not None and method in ("sample", "both")
    planner = Planner(owners, method, mixture, accountant, release, reweighted, hardened)
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
        batch_size = float(solution.sampling_rates @ owners.records)
    assert batch_size is not None
    result = Plan(
        method=method,
        accountant=accountant,
        clip_norm=float(clip_norm),
        noise_std=float(solution.noise * clip_norm),
        schedule=schedule,
        expected_batch_size=float(batch_size),
        sampling_rates=solution.sampling_rates,
        clip_norms=solution.relative_clips * clip_norm,
        targets=owners.epsilon,
        deltas=owners.delta,
        records=owners.records,
        owners_fingerprint=owners.fingerprint,
        mixture=mixture,
        release_std=None if release is None else release.std,
        release_noise=release_noise,
        release_shares=solution.sampling_rates.min() / solution.sampling_rates
        if reweighted
        else None,
        owners=owners,
    )
    if hardened:
        probability = replace(result, hardened_rows=1).overflow_probability
        rows = rows_needed(result.sampling_rates, result.records, probability)
        result = replace(result, hardened_rows=rows)
    result.verify()
    if strict and result.unspent.any():
        unspent = np.flatnonzero(result.unspent)
        first = unspent[0]
        raise PlanError(
            f"{len(unspent)} of {len(owners)} budgets cannot be used up, for example for owner "
            f"{owners.ids[first]} (epsilon {owners.epsilon[first]:g}): the sampling rate would "
            "exceed 1. Use more steps, a smaller batch, method='scale', or strict=False"
        )
    return result


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
    """Return all problems with the arguments of `plan`; `total_records` is None if unknown."""
    problems = []
    for what, given, known in (
        ("method", method, METHODS),
        ("accountant", accountant, ACCOUNTANTS),
        ("release_noise", release_noise, NOISES),
    ):
        if given not in known:
            problems.append(f"unknown {what} {given!r}; {known_names(given, known)}")
    given = sum(value is not None for value in (steps, batch_size, noise_multiplier))
    if given != 2:
        problems.append(
            f"{given} of steps, batch_size and noise_multiplier were given; expected two (the "
            "third follows from the budgets)"
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
            f"clip_norm {clip_norm!r}: expected {MIN_CLIP_NORM:g} to {1 / MIN_CLIP_NORM:g}, so "
            "that its square fits in float32"
        )
    positive = {"noise_multiplier": noise_multiplier, "release_std": release_std}
    for what, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{what} {value}: expected a positive finite number")
    if release_share is not None and not 0 < release_share < 1:
        problems.append(f"release_share {release_share}: expected more than 0 and less than 1")
    if release_share is not None and release_std is not None:
        problems.append("release_share and release_std were both given; expected one of them")
    if release_noise == "laplace" and accountant != "pld":
        problems.append(
            f"release_noise 'laplace' with accountant {accountant!r}: expected 'pld', the only "
            "accountant that supports it"
        )
    if mixture is not None and method != "both":
        problems.append(f"mixture {mixture}: only method='both' uses a mixture")
    elif mixture is not None and not 0 <= mixture <= 1:
        problems.append(f"mixture {mixture}: expected 0 (sample) to 1 (scale)")
    if segments is not None:
        total_steps = sum(int(count) for count, _ in segments)
        if steps is not None and total_steps != steps:
            problems.append(f"noise_schedule has {total_steps} steps; expected steps={steps}")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
