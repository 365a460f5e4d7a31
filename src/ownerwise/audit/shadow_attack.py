"""Membership inference: how well an attacker with shadow models tells members from others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binom, t

from ownerwise.audit.canary_attack import FAILURE
from ownerwise.audit.inference import INFERENCES
from ownerwise.audit.rates import Measured, auc, auc_and_error, share
from ownerwise.audit.results import Audit, GroupAudit
from ownerwise.audit.signals import Signals
from ownerwise.audit.trade_off import TradeOff
from ownerwise.errors import OwnerwiseError, known_names
from ownerwise.planning import Plan
from ownerwise.planning.budget_classes import class_members
from ownerwise.wording import span

FALSE_ALARM_RATES = (0.01, 0.001)
_FEWEST_BEYOND = 5  # false alarms on which a threshold must rest


def membership(
    targets: Signals,
    shadows: Signals,
    plan: Plan,
    *,
    attack: str = "LiRA online",
    failure: float = FAILURE,
) -> Audit:
    """Attack target models with shadow models, and return the result for each budget group.

    The area under the curve is averaged over the targets, with an interval from their spread.
    Thresholds are the same for all targets; they are chosen on one half of the records and judged
    on the other half, and intervals allow for both. Every figure stands beside its cap, the largest
    value that the plan permits any attack.

    The result is NOT private.

    Args:
        targets: signals of the models to attack.
        shadows: signals of other models, trained by the same private algorithm.
        plan: the plan of all these models, with owners.
        attack: one of `INFERENCES`.
        failure: probability, over all groups, that an interval of one rate misses its value.
    """
    if attack not in INFERENCES:
        raise OwnerwiseError(f"attack is {attack!r}; {known_names(attack, INFERENCES)}")
    if plan.owners is None or plan.owners.record_owner_index is None:
        raise OwnerwiseError("the plan has no owners with records")
    owner = plan.owners.record_owner_index
    if {targets.included.shape[1], shadows.included.shape[1]} != {len(owner)}:
        raise OwnerwiseError(
            f"targets have {targets.included.shape[1]} records and shadows "
            f"{shadows.included.shape[1]}; expected {len(owner)}, as in the plan"
        )
    if _in_both(targets, shadows):
        raise OwnerwiseError(
            "a target is among the shadow models: the attack would be judged on what it was "
            "fitted to. Train separate shadow models"
        )
    scores = [INFERENCES[attack](confidences, shadows) for confidences in targets.confidences]
    classes = class_members(plan.targets, plan.deltas)
    groups = []
    for members in classes:
        records = np.isin(owner, members)
        of_group = [score[records] for score in scores]
        included = [mask[records] for mask in targets.included]
        groups.append(_group(plan, members, of_group, included, failure / len(classes)))
    return Audit(
        attack=f"{attack}, {len(shadows)} shadow models",
        plan=plan.hash,
        steps=plan.steps,
        failure=failure,
        groups=groups,
        of="records",
        private=False,
    )


def _group(
    plan: Plan,
    members: np.ndarray,
    scores: Sequence[np.ndarray],
    included: Sequence[np.ndarray],
    failure: float,
) -> GroupAudit:
    curves = [TradeOff.of(plan, owner) for owner in _least_protected(plan, members)]
    halves = _halves(scores, included)
    rates, caps, chances = {}, {}, {}
    for rate in FALSE_ALARM_RATES:
        if len(halves.other_scores) < _FEWEST_BEYOND / rate:
            continue  # no threshold has this rate
        name = f"detections at {rate:.1%} false alarms"
        rates[name] = _detections(halves, rate, failure)
        caps[name] = max(float(curve.power(rate)) for curve in curves)
        chances[name] = rate
    name = "balanced accuracy"
    rates[name] = _balanced(halves, failure)
    caps[name], chances[name] = max(curve.accuracy for curve in curves), 0.5
    return GroupAudit(
        name=f"ε = {span(float(plan.targets[members].min()), float(plan.targets[members].max()))}",
        promised=float(plan.targets[members].max()),
        delta=float(plan.deltas[members].max()),
        members=len(scores[0]),
        auc=_mean_auc(scores, included, failure),
        cap=max(curve.area for curve in curves),
        rates=rates,
        rate_caps=caps,
        rate_chances=chances,
    )


def _least_protected(plan: Plan, members: np.ndarray) -> set[int]:
    """Return the members of a class whose plan permits the strongest attacks.

    These have the largest epsilon; among them, curves differ with the number of records that count
    together.
    """
    lax = members[plan.targets[members] == plan.targets[members].max()]
    together = plan.counted_together
    count = np.ones(len(lax)) if together is None else together[lax]
    return {int(lax[count.argmin()]), int(lax[count.argmax()])}


class _Halves(NamedTuple):
    """Scores of members and others of all targets.

    Attributes:
        member_scores, other_scores: those on which a threshold is chosen.
        judged_members, judged_others: those on which it is judged.
    """

    member_scores: np.ndarray
    other_scores: np.ndarray
    judged_members: np.ndarray
    judged_others: np.ndarray


def _halves(scores: Sequence[np.ndarray], included: Sequence[np.ndarray]) -> _Halves:
    every, masks = np.stack(scores), np.stack(included)
    even = np.arange(every.shape[1]) % 2 == 0
    return _Halves(*(every[mask & half] for half in (even, ~even) for mask in (masks, ~masks)))


def _detections(halves: _Halves, rate: float, failure: float) -> Measured:
    """Return the rate of detections at a rate of false alarms.

    The rate of false alarms above the k-th largest score of n others has a Beta distribution. The
    ends of the interval use thresholds whose rate is at most (at least) the stated one, except with
    a quarter of the probability of failure each.
    """
    others, members = np.sort(halves.other_scores)[::-1], halves.judged_members
    count, quarter = len(others), failure / 4
    low, high = 0.0, 1.0
    surely_fewer = int(binom.ppf(quarter, count, rate)) - 1
    if surely_fewer >= 0:
        found = int((members > others[surely_fewer]).sum())
        low = share(found, len(members), failure / 2).low
    surely_more = int(binom.ppf(1 - quarter, count, rate))
    if surely_more < count:
        found = int((members >= others[surely_more]).sum())
        high = share(found, len(members), failure / 2).high
    found = int((members > others[int(rate * count)]).sum())
    return Measured(found / max(1, len(members)), low, high)


def _balanced(halves: _Halves, failure: float) -> Measured:
    threshold = _best_threshold(halves.member_scores, halves.other_scores)
    members, others = halves.judged_members, halves.judged_others
    detected = share(int((members > threshold).sum()), len(members), failure / 2)
    rejected = share(int((others <= threshold).sum()), len(others), failure / 2)
    return Measured(*(sum(pair) / 2 for pair in zip(detected, rejected, strict=True)))


def _best_threshold(members: np.ndarray, others: np.ndarray) -> float:
    values = np.concatenate([members, others])
    if not len(values):
        return 0.0
    candidates = np.quantile(values, np.linspace(0, 1, 201))
    above = 1 - np.searchsorted(np.sort(members), candidates, side="right") / max(1, len(members))
    below = np.searchsorted(np.sort(others), candidates, side="right") / max(1, len(others))
    return float(candidates[np.argmax(above + below)])


def _mean_auc(
    scores: Sequence[np.ndarray], included: Sequence[np.ndarray], failure: float
) -> Measured:
    pairs = [(score[mask], score[~mask]) for score, mask in zip(scores, included, strict=True)]
    if len(pairs) == 1:
        return auc(*pairs[0], failure)
    values = np.array([auc_and_error(*pair)[0] for pair in pairs])
    reach = float(t.ppf(1 - failure / 2, len(values) - 1) * values.std(ddof=1))
    reach /= math.sqrt(len(values))
    mean = float(values.mean())
    return Measured(mean, max(0.0, mean - reach), min(1.0, mean + reach))


def _in_both(targets: Signals, shadows: Signals) -> bool:
    """Return whether a target and a shadow model have the same members and outputs."""
    known: dict[bytes, list[np.ndarray]] = {}
    for confidences, included in zip(shadows.confidences, shadows.included, strict=True):
        known.setdefault(included.tobytes(), []).append(confidences)
    return any(
        np.allclose(confidences, of_shadow, rtol=1e-3, atol=1e-3)
        for confidences, included in zip(targets.confidences, targets.included, strict=True)
        for of_shadow in known.get(included.tobytes(), ())
    )
