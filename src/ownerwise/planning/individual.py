"""Plans with individual accounting: every record takes part until its own gradients used it up.

Every step uses all records, and a record is charged for its own clipped gradient instead of the
largest one that its clip norm allows. A record whose gradients are small therefore takes part in
more steps than the worst case allows. When a step would exceed the record's budget, the record
retires, and the steps go on without it, with the same noise and the same divisor.

What the plan fixes in advance, per owner: the clip norm C_o and the limit L_o of a filter
(`accounting.filters`) on the sum of the squared sensitivities of a record, in units of the noise
variance s^2. A record whose gradients are all clipped can take part in L_o s^2 / C_o^2 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ownerwise.accounting import FILTERS, filter_limits, gaussian_delta
from ownerwise.owners import of_holders
from ownerwise.planning.solver import SAFETY

METHOD = "individual"
"""The planning method."""

NO_ADVICE = (
    "method 'individual' with advice: expected another method, because the number of steps that "
    "records take depends on their gradients"
)

_MARGIN = 1e-9  # by which the noise exceeds what the clipped steps need, for rounding

REASONS = {
    "constraints": "a record adds to the histogram even if its gradient is zero",
    "release_std": "a record adds to the release even if its gradient is zero",
    "release_share": "a record adds to the release even if its gradient is zero",
    "calibration": "a record adds to the sums after training even if its gradients are zero",
    "statistics": "a record adds to the statistics even if its gradients are zero",
    "noise_schedule": "the filter's limit is in units of a constant noise",
}
"""Why the arguments of a plan cannot be combined with individual accounting."""


def request_problems(request: Any) -> list[str]:
    """Return the problems of a request that concern individual accounting."""
    own = {"clipped_steps": request.clipped_steps, "filter": request.filter}
    own["clip_to_remaining"] = request.clip_to_remaining or None
    if request.method != METHOD:
        return [
            f"{name} {value!r} with method {request.method!r}: expected method='individual', the "
            "only one that uses it"
            for name, value in own.items()
            if value is not None
        ]
    problems = [
        f"{name} with method 'individual': expected none, because {reason}"
        for name, reason in REASONS.items()
        if getattr(request, name) is not None
    ]
    if request.adaptive_clip_norm is not None:
        problems.append(
            "an adaptive clip norm with method 'individual': expected a number, because a record "
            "adds to the released number even if its gradient is zero"
        )
    if request.filter is not None and request.filter not in FILTERS:
        problems.append(f"filter {request.filter!r}: expected one of {', '.join(FILTERS)}")
    if type(request.clip_to_remaining) is not bool:
        problems.append(f"clip_to_remaining {request.clip_to_remaining!r}: expected True or False")
    if request.accountant != "pld":
        problems.append(
            f"accountant {request.accountant!r} with method 'individual': expected 'pld'; for a "
            "Renyi filter, use filter='rdp'"
        )
    if request.steps is None or request.epochs is not None:
        problems.append("steps: expected a number with method 'individual', and no epochs")
    if request.batch_size is not None:
        problems.append(
            f"batch_size {request.batch_size!r} with method 'individual': expected none, because "
            "every step uses all records"
        )
    if request.noise_multiplier is not None and request.clipped_steps is not None:
        problems.append("noise_multiplier and clipped_steps were both given; expected at most one")
    count = request.clipped_steps
    if count is not None and not (_is_number(count) and 0 < count < float("inf")):
        problems.append(f"clipped_steps {count!r}: expected a positive finite number")
    if (request.unit, request.sampling) == ("owner", "record"):
        problems.append(
            "unit 'owner' with sampling 'record' and method 'individual': expected "
            "sampling='owner', because an owner is charged for the gradient of all their records"
        )
    return problems


def solve(request: Any, epsilon: np.ndarray, delta: np.ndarray, elements: np.ndarray, shared: Any):
    """Return each owner's limit and clip norm, and the noise std.

    Args:
        request: the request, without problems.
        epsilon, delta: the budgets; delta is what remains of it for the steps.
        elements: how many things there are of each holder.
        shared: the sets of owners who share records, if any.
    """
    limits = filter_limits(request.filter or FILTERS[0], epsilon * (1 - SAFETY), delta)
    mixture = 1.0 if request.mixture is None else request.mixture
    clips = (limits / limits.max()) ** (mixture / 2)
    average = float(elements @ of_holders(clips, shared)) / float(elements.sum())
    clips = clips / average * request.initial_clip_norm
    if request.noise_multiplier is not None:
        return limits, clips, float(request.noise_multiplier * request.initial_clip_norm)
    count = request.steps if request.clipped_steps is None else request.clipped_steps
    noise = float((clips * np.sqrt(count / limits)).max())
    return limits, clips, noise * (1 + _MARGIN)


def plan_problems(plan: Any) -> list[str]:
    """Return a problem for each value of a plan that does not fit individual accounting."""
    if plan.filter is None:
        wrong = plan.filter_limits is not None or plan.clip_to_remaining
        return ["filter_limits without a filter: expected both, or neither"] if wrong else []
    if plan.filter not in FILTERS or plan.filter_limits is None:
        return [f"filter {plan.filter!r}: expected one of {', '.join(FILTERS)}, and its limits"]
    problems = []
    if plan.method != METHOD:
        problems.append(f"filter with method {plan.method!r}: expected method 'individual'")
    if not (plan.sampling_rates == 1).all():
        problems.append("sampling_rates with a filter: expected 1, because steps use all records")
    if plan.unit != plan.sampling:
        problems.append("unit with a filter: expected the same as sampling")
    if plan.hardened_rows is None:
        problems.append("hardened_rows with a filter: expected the number of all rows")
    if plan.records_per_owner is not None:
        problems.append("records_per_owner with a filter: expected None, all records")
    if len(plan.schedule.segments) != 1 or plan.schedule.segments[0][1] != 1:
        problems.append("schedule with a filter: expected constant noise")
    for name in ("release_std", "closing_std", "opening_std", "adaptive_clip_norm"):
        if getattr(plan, name) is not None:
            problems.append(f"{name} with a filter: expected None")
    if type(plan.clip_to_remaining) is not bool:
        problems.append(f"clip_to_remaining {plan.clip_to_remaining!r}: expected True or False")
    found = gaussian_delta(np.sqrt(plan.filter_limits), plan.targets)
    if over := int((~(found <= plan.accounted_deltas)).sum()):
        problems.append(f"filter_limits: {over} would allow more than an owner's budget")
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
