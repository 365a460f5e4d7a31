"""`plan`, which turns a request and the owners' budgets into a verified Plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ownerwise.accounting import FILTERS, MULTIPLIER_RANGE, PaidRelease, Schedule
from ownerwise.errors import PlanError, name_some
from ownerwise.owners import Owners, records_of_holders
from ownerwise.planning import individual, units
from ownerwise.planning.adaptive_clip_norm import AdaptiveClipNorm
from ownerwise.planning.batch_bounds import delta_reserve, overflow_probability, rows_needed
from ownerwise.planning.noise_schedules import NoiseSchedule
from ownerwise.planning.plans import Plan
from ownerwise.planning.request import (
    RECORDS_PER_OWNER,
    ClosingMechanism,
    OpeningMechanism,
    PaidMechanism,
    PlanRequest,
)
from ownerwise.planning.solver import MAX_STEPS, Planner, Solution


def plan(
    owners: Owners,
    method: str = "sample",
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float | str | AdaptiveClipNorm = 1.0,
    mixture: float | None = None,
    noise_schedule: NoiseSchedule | None = None,
    release_std: float | None = None,
    release_share: float | None = None,
    release_noise: str = "gaussian",
    constraints: PaidMechanism | None = None,
    calibration: ClosingMechanism | None = None,
    statistics: OpeningMechanism | None = None,
    accountant: str = "pld",
    strict: bool = False,
    hardened: bool = False,
    unit: str = "record",
    sampling: str | None = None,
    records_per_owner: int | None = RECORDS_PER_OWNER,
    clipped_steps: float | None = None,
    filter: str | None = None,
    clip_to_remaining: bool = False,
) -> Plan:
    """Return a verified Plan in which every owner spends their own budget.

    Specify two of `steps`, `batch_size` (expected number of records per step) and
    `noise_multiplier` (noise std divided by `clip_norm`); the third follows from the budgets. With
    method `individual`, specify `steps`, and `clipped_steps` or `noise_multiplier`.

    Args:
        owners: the owners, with their budgets and numbers of records.
        method: `uniform`: one sampling rate and one clip norm, with enough noise for the strictest
            owner (DP-SGD). `sample`: individual sampling rates, one clip norm. `scale`: one
            sampling rate, individual clip norms whose average over records is `clip_norm`. `both`:
            the clip norms of `scale` raised to the power `mixture`, and individual sampling rates
            that use up the rest of each budget. `individual`: every step uses all records, and
            each record is charged for its own gradient and takes part until its budget is used up
            (docs/how-to/individual-accounting.md).
        steps: number of steps.
        epochs: expected number of times that a record is drawn on average, instead of `steps`;
            needs `batch_size`. The number of steps is `epochs` times the declared number of records
            divided by `batch_size`, rounded.
        batch_size: expected batch size; the noised sum is divided by it.
        noise_multiplier: std of the noise on the sum, divided by `clip_norm`.
        clip_norm: bound on a record's gradient norm (the average over records if bounds differ),
            or `AdaptiveClipNorm(...)` (or "adaptive"), which follows a quantile of the norms at a
            small cost.
        mixture: for `both`, from 0 (sample) to 1 (scale); by default 0.5. For `individual`, from 0
            (one clip norm) to 1 (clip norms in proportion to the noise that each budget allows, so
            that clipped records of all owners can take the same number of steps); by default 1.
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
        release_noise: "gaussian", or "laplace" (for vectors with an L1 norm of at most 1; needs
            `pld`).
        constraints: rate constraints whose histogram the plan accounts for. Unless `release_share`
            or `release_std` is given, the release share is 0.1. Records that are drawn more often
            contribute less to the histogram, so all records count equally.
        calibration: a release from all records after training, such as `Calibration()`; every owner
            pays for it from their budget.
        statistics: a release from all records before training, such as `ColumnStatistics()`, which
            scales and imputes the columns of a table; every owner pays for it from their budget.
        accountant: `pld` (tight) or `rdp`.
        strict: refuse plans in which some owner cannot use up their budget.
        hardened: compute every batch with the same public number of rows, and place the records in
            secret random rows. A record then cannot change a single bit of what is computed for
            another record. The cost is that empty rows are computed as well
            (docs/proofs/arithmetic.md).
        unit: "record": each epsilon holds for one record of the owner. "owner": it holds for the
            owner with all of their records.
        sampling: what is drawn at each step, by default the unit. "owner" draws whole owners: the
            owner's gradient is the mean over their records and is clipped as one vector, and
            `batch_size` counts owners.
        records_per_owner: with owner sampling, the largest number of an owner's records in a step,
            chosen at random; None for all.
        clipped_steps: for `individual`: the number of steps that the budget of a record pays for if
            its gradient is clipped in every one (for the strictest owner, if they differ); the
            noise follows from it. By default, it equals `steps`; individual accounting helps only
            with fewer. Pass either this or `noise_multiplier`.
        filter: for `individual`: "gdp" (default, tight), "rdp" or "zcdp".
        clip_to_remaining: for `individual`: whether a record whose budget does not pay for a whole
            step takes part once more, clipped to what remains. By default, it retires at once.
    """
    request = PlanRequest(
        method=method,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        mixture=mixture,
        noise_schedule=noise_schedule,
        release_std=release_std,
        release_share=release_share,
        release_noise=release_noise,
        constraints=constraints,
        calibration=calibration,
        statistics=statistics,
        accountant=accountant,
        strict=strict,
        hardened=hardened,
        unit=unit,
        sampling=sampling,
        records_per_owner=records_per_owner,
        clipped_steps=clipped_steps,
        filter=filter,
        clip_to_remaining=clip_to_remaining,
    )
    return make_plan(owners, request)


def make_plan(owners: Owners, request: PlanRequest) -> Plan:
    """Return the verified Plan that a request describes, or raise a PlanError."""
    result = solved_plan(owners, request)
    if request.method == individual.METHOD:  # verified already
        return result
    result.verify()
    if request.strict and result.unspent.any():
        raise PlanError(_unspent_problem(owners, result))
    return result


def solved_plan(owners: Owners, request: PlanRequest) -> Plan:
    """Return the Plan that a request describes, which is not verified yet."""
    total = int(request.elements_of_holders(owners).sum())
    request = request.resolved(total)
    problems = request.problems(total)
    if request.sampling == "owner":
        problems += units.shared_problems(owners)
    if request.unit == "record" and not owners.records.all():
        problems.append(
            f"records of owner {name_some(owners.ids[owners.records == 0])} (0): expected at least "
            "1 with unit 'record'; leave out owners who have none"
        )
    if problems:
        raise PlanError(problems)
    if request.method == individual.METHOD:
        return _individual_plan(owners, request)
    release = _release(owners, request)
    reweighted = request.constraints is not None and request.method in ("sample", "both")
    planner = planner_for(owners, request, release, reweighted)
    schedule, batch_size, solution = _solve(owners, request, planner)
    rates = solution.sampling_rates
    closing_shares, closing_pulls = planner.closing_lengths()
    result = Plan(
        method=request.method,
        accountant=request.accountant,
        clip_norm=request.initial_clip_norm,
        noise_std=float(solution.noise * request.initial_clip_norm),
        schedule=schedule,
        expected_batch_size=float(batch_size),
        sampling_rates=rates,
        clip_norms=solution.relative_clips * request.initial_clip_norm,
        targets=owners.epsilon,
        deltas=owners.delta,
        records=owners.records,
        owners_fingerprint=owners.fingerprint,
        mixture=planner.mixture,
        release_std=None if release is None else release.std,
        release_noise=request.release_noise,
        release_shares=rates.min() / rates if reweighted else None,
        closing_std=None if planner.closing is None else planner.closing.std,
        closing_count=0 if planner.closing is None else planner.closing.count,
        closing_shares=closing_shares,
        closing_pulls=closing_pulls,
        opening_std=None if planner.opening is None else planner.opening.std,
        unit=request.unit,
        sampling=str(request.sampling),
        records_per_owner=_records_per_owner(request),
        shared=owners.shared,
        adaptive_clip_norm=request.adaptive_clip_norm,
        owners=owners,
    )
    if request.hardened:
        probability = overflow_probability(result.deltas, result.steps, hardened=True)
        result = with_rows(result, probability)
    return result


def with_rows(plan: Plan, probability: float) -> Plan:
    """Return a hardened plan with the rows that a batch exceeds with at most this probability."""
    holders = plan.holders
    rows = rows_needed(holders.sampling_rates, holders.elements, probability)
    return replace(plan, hardened_rows=rows)


def _individual_plan(owners: Owners, request: PlanRequest) -> Plan:
    """Return the verified plan of a request with individual accounting."""
    elements = request.elements_of_holders(owners)
    deltas = owners.delta * (1 - delta_reserve(hardened=True))
    shared = owners.shared if request.sampling == "record" else None
    limits, clip_norms, noise_std = individual.solve(
        request, owners.epsilon, deltas, elements, shared
    )
    schedule = request.schedule
    assert schedule is not None
    result = Plan(
        method=request.method,
        accountant=request.accountant,
        clip_norm=request.initial_clip_norm,
        noise_std=noise_std,
        schedule=schedule,
        expected_batch_size=float(elements.sum()),
        sampling_rates=np.ones(len(owners)),
        clip_norms=clip_norms,
        targets=owners.epsilon,
        deltas=owners.delta,
        records=owners.records,
        owners_fingerprint=owners.fingerprint,
        mixture=request.mixture,
        hardened_rows=int(records_of_holders(owners.records, shared).sum()),
        unit=request.unit,
        sampling=str(request.sampling),
        filter=request.filter or FILTERS[0],
        filter_limits=limits,
        clip_to_remaining=request.clip_to_remaining,
        shared=owners.shared,
        owners=owners,
    )
    result.verify()
    if request.strict and result.unspent.any():
        raise PlanError(
            f"{int(result.unspent.sum())} of {len(owners)} budgets cannot be used up, even if "
            "every gradient is clipped; use more steps, fewer clipped_steps, or strict=False"
        )
    return result


def _records_per_owner(request: PlanRequest) -> int | None:
    most = request.records_per_owner
    return int(most) if request.sampling == "owner" and most is not None else None


def _release(owners: Owners, request: PlanRequest) -> PaidRelease | None:
    """Return the additional release, with the noise that spends its share of a step's cost."""
    share, std = request.release_share, request.release_std
    paid = request.constraints if request.adaptive_clip_norm is None else request.adaptive_clip_norm
    if share is None and std is None and paid is not None:
        share = paid.release_share
    # The costs of the gradient and of the release, each 1 / multiplier^2, add up to the cost of a
    # step. If the gradient's multiplier is given, the release costs share / (1 - share) times as
    # much as the gradient. Otherwise, the multiplier of a step without a release is found, and the
    # release costs its share of such a step.
    if share is not None and request.noise_multiplier is not None:
        std = request.noise_multiplier * ((1 - share) / share) ** 0.5
    elif share is not None:
        _, _, alone = _solve(owners, request, planner_for(owners, request))
        strictest = alone.noise / float(alone.relative_clips.min())  # multiplier of a whole step
        std = strictest / share**0.5
    return None if std is None else PaidRelease(float(std), request.release_noise)


def planner_for(
    owners: Owners,
    request: PlanRequest,
    release: PaidRelease | None = None,
    reweighted: bool = False,
) -> Planner:
    """Return the planner for a request, apart from its steps, batch size and noise."""
    mixture = 0.5 if request.mixture is None and request.method == "both" else request.mixture
    closing = None
    if request.calibration is not None:
        elements = request.elements(owners)
        closing = request.calibration.closing(owners.epsilon, owners.delta, elements)
    opening = None
    if request.statistics is not None:
        opening = request.statistics.opening(owners.epsilon, owners.delta, request.unit)
    return Planner(
        owners,
        request.method,
        mixture,
        request.accountant,
        release,
        closing,
        reweighted,
        request.hardened,
        request.elements_of_holders(owners),
        request.counted_together(owners),
        opening,
    )


def _solve(
    owners: Owners, request: PlanRequest, planner: Planner
) -> tuple[Schedule, float, Solution]:
    """Solve for the value not given; return the schedule, expected batch size and solution."""
    schedule, batch_size, noise = request.schedule, request.batch_size, request.noise_multiplier
    if noise is None:
        assert schedule is not None
        assert batch_size is not None
        return schedule, batch_size, planner.find_noise(schedule, batch_size)
    if schedule is None:
        assert batch_size is not None
        steps, solution = planner.find_steps(batch_size, noise)
        return Schedule.constant(steps), batch_size, solution
    solution = planner.find_batch(schedule, noise)
    return schedule, planner.batch_size(solution.sampling_rates), solution


def _unspent_problem(owners: Owners, plan: Plan) -> str:
    unspent = np.flatnonzero(plan.unspent)
    first = int(unspent[0])
    return (
        f"{len(unspent)} of {len(owners)} budgets cannot be used up, for example for owner "
        f"{owners.ids[first]} (epsilon {owners.epsilon[first]:g}): {_why_unspent(plan, first)}, or "
        "strict=False"
    )


def _why_unspent(plan: Plan, owner: int) -> str:
    """Return the limit that keeps an owner from using up their budget, and what to do about it."""
    if plan.method == "uniform" and not plan.unspent.all():
        return "method='uniform' adds the noise that the strictest owner needs. Use another method"
    least = MULTIPLIER_RANGE[0]  # a limit only for methods that solve for multipliers
    if plan.method in ("uniform", "scale") and plan.noise_multipliers[owner] < 1.01 * least:
        return f"the noise multiplier would fall below {least:g}. Use more steps, a larger batch"
    if plan.sampling_rates[owner] > 0.999:
        other = "" if plan.method == "scale" else ", method='scale'"
        return (
            f"the sampling rate would exceed 1. Use more steps, a smaller batch, less noise{other}"
        )
    return (
        f"one more step would exceed a budget, or the limit of {MAX_STEPS} steps. Use another "
        "batch size, another noise multiplier"
    )
