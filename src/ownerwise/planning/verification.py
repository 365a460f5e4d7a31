"""Verification: the checks that a plan must pass before it is used with any record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ownerwise.accounting import Exposure, reference
from ownerwise.errors import AccountingError, PlanError
from ownerwise.planning import individual, storage
from ownerwise.planning.adaptive_clip_norm import AdaptiveClipNorm
from ownerwise.planning.batch_bounds import rows_needed
from ownerwise.planning.budget_classes import distinct_budgets
from ownerwise.planning.tuning import Tuning

POINTS = 8
"""Number of budgets that dp-accounting checks by default."""

_verified: set[str] = set()
"""Hashes of the plans that this process has verified."""


@dataclass(frozen=True)
class Verification:
    """Result of checking a plan with an independent accountant."""

    accountant: str
    points: int
    lowest_ratio: float
    highest_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.accountant} at {self.points} budgets: spends {self.lowest_ratio:.4f} to "
            f"{self.highest_ratio:.4f} of the target"
        )


def is_verified(plan: Any) -> bool:
    """Return whether this process has verified a plan with the same hash."""
    return plan.hash in _verified


def verify(plan: Any, points: int) -> Verification:
    """Recompute epsilon and raise PlanError if it exceeds a target; see `Plan.verify`."""
    problems = _value_problems(plan) + _unit_problems(plan) + _adaptive_problems(plan)
    problems = problems or _tuning_problems(plan)
    problems = problems or _shared_problems(plan) or owner_problems(plan)
    problems = problems or individual.plan_problems(plan)
    if problems:  # no accountant can handle such values
        raise PlanError(problems)
    problems = _row_problems(plan)
    divisor = float(plan.holders.sampling_rates @ plan.holders.elements)
    if not np.isclose(divisor, plan.expected_batch_size, rtol=1e-9):
        problems.append(
            f"the expected batch size is {plan.expected_batch_size:g}, but the sampling rates "
            f"of the declared {plan.sampling}s give {divisor:g}"
        )
    try:
        spent = plan.epsilon()
    except AccountingError as error:
        raise PlanError([*problems, *error.problems]) from None
    over = np.flatnonzero(~(spent <= plan.targets))  # NaN counts as over
    if len(over):
        worst = over[np.argmax(spent[over] / plan.targets[over])]
        owners = "1 owner" if len(over) == 1 else f"{len(over)} owners"
        problems.append(
            f"{owners} would spend more than budgeted, at worst "
            f"{spent[worst]:.6g} instead of epsilon {plan.targets[worst]:g}"
        )
    chosen = _spread(plan, points)
    ratios = np.empty(len(chosen))
    for at, owner in enumerate(chosen):
        target = float(plan.targets[owner])
        exposure = Exposure(*(float(part[owner]) for part in plan.exposures))
        delta = float(plan.accounted_deltas[owner])
        count = 1 if plan.counted_together is None else int(max(plan.records[owner], 1))
        if plan.tuning is None:
            by_reference = reference.epsilon(plan.run_cost, exposure, delta, target, count)
        else:
            by_reference = _search_by_reference(plan, owner, count, float(spent[owner]))
        ratios[at] = by_reference / target
        if not by_reference <= target:
            problems.append(
                f"an owner with epsilon {target:g}, delta {plan.deltas[owner]:g} would spend "
                f"{by_reference:.6g} according to "
                f"{reference.name() if plan.tuning is None else reference.search_name()}"
            )
    if problems:
        raise PlanError(problems)
    if points >= POINTS:
        _verified.add(plan.hash)
    name = reference.name() if plan.tuning is None else reference.search_name()
    return Verification(name, len(chosen), float(ratios.min()), float(ratios.max()))


def _search_by_reference(plan: Any, owner: int, records: int, own: float) -> float:
    """Return the largest epsilon that dp-accounting states for a search with any one candidate.

    It has no event for several records of an owner drawn at random; the plan's own figure then
    stands.
    """
    tuning = plan.tuning
    delta = float(tuning.deltas(plan.accounted_deltas[owner]))
    if records > 1:
        return own
    return max(
        reference.search_epsilon(
            tuning.law,
            rival.run,
            Exposure(*(float(part[owner]) for part in rival.exposures)),
            delta,
            tuning.score_std,
        )
        for rival in tuning.rivals
    )


def _tuning_problems(plan: Any) -> list[str]:
    """Return a problem for each value that does not fit the search that a plan accounts for."""
    tuning = plan.tuning
    if tuning is None:
        return []
    if type(tuning) is not Tuning:
        return [f"tuning is a {type(tuning).__name__}; expected a Tuning"]
    problems = tuning.problems(plan.targets, plan.deltas)
    if not problems and not any(map(plan.rival.same_as, tuning.rivals)):
        problems.append("tuning: the plan's own cost is not among those of the candidates")
    return problems


def owner_problems(plan: Any) -> list[str]:
    """Return a problem if the plan's arrays were not made for its owners."""
    owners = plan.owners
    if owners is None:
        return []
    same = np.array_equal(owners.records, plan.records)
    if owners.fingerprint != plan.owners_fingerprint or not same or owners.shared != plan.shared:
        return [
            "the plan was made for different owners: ids or declared numbers of records differ; "
            "make a new plan for these owners"
        ]
    budgets = ((owners.epsilon, plan.targets), (owners.delta, plan.deltas))
    if not all(np.array_equal(own, planned) for own, planned in budgets):
        return ["the plan and its owners have different budgets; make a new plan for these owners"]
    return []


def _value_problems(plan: Any) -> list[str]:
    """Return a problem for each value in the plan that is invalid for every mechanism."""
    above_0 = "finite numbers above 0", lambda x: (x > 0) & np.isfinite(x)
    share = "numbers above 0 and at most 1", lambda x: (x > 0) & (x <= 1)
    expected = {
        "sampling_rates": ("numbers from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
        "clip_norms": above_0,
        "targets": above_0,
        "deltas": ("numbers between 0 and 1", lambda x: (x > 0) & (x < 1)),
        "records": ("numbers of at least 0", lambda x: (x >= 0) & np.isfinite(x)),
        "release_shares": share,
        "closing_shares": ("numbers from 0 to 1", lambda x: (x >= 0) & (x <= 1)),
        "closing_pulls": share,
        "filter_limits": above_0,
    }
    problems = []
    shape = plan.targets.shape
    for name in storage.columns(plan):
        array = getattr(plan, name)
        kind, is_valid = expected[name]
        if array.shape != shape or array.ndim != 1 or array.dtype.kind not in "fiu":
            problems.append(
                f"{name}: {array.dtype} of shape {array.shape}; expected a list of {kind}"
            )
        elif not is_valid(array).all():
            problems.append(f"{name}: {array[~is_valid(array)][0]:g}; expected {kind}")
    if (plan.closing_std is None) != (plan.closing_count == 0) or plan.closing_count < 0:
        problems.append(
            f"closing_count: {plan.closing_count!r} with closing_std {plan.closing_std!r}; "
            "expected at least 1 with a std, or 0 without one"
        )
    if plan.closing_shares is not None and plan.closing_std is None:
        problems.append("closing_shares without closing_std: expected both, or neither")
    if plan.closing_shares is not None and not np.any(plan.closing_shares):
        problems.append("closing_shares are all 0; expected an owner who contributes")
    if plan.closing_pulls is not None and plan.closing_shares is None:
        problems.append("closing_pulls without closing_shares: expected both, or neither")
    for name in ("noise_std", "release_std", "closing_std", "opening_std"):
        value = getattr(plan, name)
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{name}: {value!r}; expected a finite number above 0")
    return problems


def _adaptive_problems(plan: Any) -> list[str]:
    """Return a problem for each value that does not fit an adaptive clip norm."""
    adaptive = plan.adaptive_clip_norm
    if adaptive is None:
        return []
    if type(adaptive) is not AdaptiveClipNorm:
        return [f"adaptive_clip_norm is a {type(adaptive).__name__}; expected an AdaptiveClipNorm"]
    problems = [f"adaptive_clip_norm: {problem}" for problem in adaptive.problems()]
    if adaptive.initial != plan.clip_norm:
        problems.append(
            f"adaptive_clip_norm begins at {adaptive.initial!r}; expected the plan's clip norm, "
            f"{plan.clip_norm!r}"
        )
    accounted = plan.release_std is not None and plan.release_noise == "gaussian"
    if not accounted or plan.release_shares is not None:
        problems.append(
            "adaptive_clip_norm: the plan must account for a release at every step with Gaussian "
            "noise, to which every record contributes in full"
        )
    return problems


def _unit_problems(plan: Any) -> list[str]:
    """Return a problem for each value that does not fit the unit of privacy."""
    most = plan.records_per_owner
    drawn = plan.unit, plan.sampling
    if drawn not in (("record", "record"), ("owner", "owner"), ("owner", "record")):
        return [
            f"unit {plan.unit!r} with sampling {plan.sampling!r}: expected 'record' for both, or "
            "unit 'owner' with either"
        ]
    if drawn == ("owner", "record"):
        given = {
            "hardened_rows": plan.hardened_rows,
            "closing_std": plan.closing_std,
            "release_std with Laplace noise": None
            if plan.release_noise == "gaussian"
            else plan.release_std,
        }
        return [
            f"{name} with unit 'owner' and sampling 'record': expected None"
            for name, value in given.items()
            if value is not None
        ]
    if most is not None and (plan.sampling != "owner" or type(most) is not int or most < 1):
        return [f"records_per_owner: {most!r}; expected at least 1, with owner sampling"]
    if plan.sampling == "owner" and plan.hardened_rows is not None and plan.filter is None:
        return ["hardened_rows with owner sampling: expected None"]
    return []


def _shared_problems(plan: Any) -> list[str]:
    """Return a problem if the sets of owners who share records cannot be right."""
    shared = plan.shared
    if shared is None:
        return []
    if plan.sampling == "owner":
        return ["records with several owners and sampling 'owner': expected sampling 'record'"]
    count = len(plan.targets)
    shapes = len(shared.sizes) == len(shared.records) > 0 and (shared.sizes > 1).all()
    if not shapes or shared.sizes.sum() != len(shared.members):
        return ["shared: expected the members, size and number of records of at least one set"]
    if not ((shared.members >= 0) & (shared.members < count)).all():
        return [f"shared: a set names an owner who is not among the {count} owners of the plan"]
    sets = shared.sets()
    rising = all(first < then for one in sets for first, then in pairwise(one))
    if not rising or len(set(sets)) < len(sets):
        return ["shared: expected every set once, with its owners in ascending order"]
    if (shared.records < 0).any() or (shared.per_owner(count) > plan.records).any():
        return ["shared: an owner shares more records than they declare"]
    return []


def _row_problems(plan: Any) -> list[str]:
    """Return a problem if a hardened plan has fewer rows than its sampling rates need."""
    if plan.hardened_rows is None:
        return []
    holders = plan.holders
    needed = rows_needed(holders.sampling_rates, holders.elements, plan.overflow_probability)
    if plan.hardened_rows >= needed:
        return []
    return [
        f"a hardened plan with these rates needs {needed} rows; this one has "
        f"{plan.hardened_rows}, so more batches would overflow than delta allows for"
    ]


def _spread_over_records(plan: Any, points: int) -> np.ndarray:
    """Return owners with the most records and the strictest budget, and others in between."""
    by_budget = np.lexsort((plan.records, plan.targets))
    by_records = np.lexsort((-plan.targets, plan.records))
    last = len(by_records) - 1
    chosen = [by_records[-1], by_budget[0], by_budget[-1]]
    chosen += [by_records[last * at // points] for at in range(1, points)]
    return np.array(list(dict.fromkeys(chosen))[:points])


def _spread(plan: Any, points: int) -> np.ndarray:
    """Return owners with distinct budgets: the extremes for every delta, and some in between."""
    if plan.counted_together is not None:
        return _spread_over_records(plan, max(1, points // 2))  # each takes longer
    first, _ = distinct_budgets(plan.targets, plan.deltas)
    if len(first) <= points:
        return first
    edges = np.flatnonzero(np.diff(plan.deltas[first])) if len(first) > 1 else np.array([])
    ends = np.concatenate([[0, len(first) - 1], edges, edges + 1]).astype(int)
    if len(ends) > points // 2:
        ends = ends[np.linspace(0, len(ends) - 1, max(2, points // 2)).astype(int)]
    between = np.linspace(0, len(first) - 1, points - len(ends) + 2).astype(int)[1:-1]
    return first[np.unique(np.concatenate([ends, between]))]
