"""Membership inference: how well an attacker with shadow models tells members from others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import t

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
    Thresholds are chosen on one half of a target's records and judged on the other half. Every
    figure stands beside its cap, the largest value that the plan permits any attack.

    The result is NOT private.

    Args:
        targets: signals of the models to attack.
        shadows: signals of other models, trained by the same private algorithm.
        plan: the plan of all these models, with owners.
        attack: one of `INFERENCES`.
        failure: probability that an interval misses its value, over all groups.
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
            "fitted to. Train shadow models of their own"
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
    )


def _group(
    plan: Plan,
    members: np.ndarray,
    scores: Sequence[np.ndarray],
    included: Sequence[np.ndarray],
    failure: float,
) -> GroupAudit:
    cap = TradeOff.of(plan, int(members[-1]))
    halves = [_halved(*pair) for pair in zip(scores, included, strict=True)]
    rates = {}
    caps = {}
    for rate in FALSE_ALARM_RATES:
        if min(len(others) for _, others, _, _ in halves) < _FEWEST_BEYOND / rate:
            continue  # no threshold has this rate
        name = f"detections at {rate:.1%} false alarms"
        rates[name] = _detections(halves, rate, failure)
        caps[name] = float(cap.power(rate))
    rates["balanced accuracy"] = _balanced(halves, failure)
    caps["balanced accuracy"] = cap.accuracy
    return GroupAudit(
        name=f"ε = {span(float(plan.targets[members].min()), float(plan.targets[members].max()))}",
        promised=float(plan.targets[members].max()),
        delta=float(plan.deltas[members[-1]]),
        members=len(scores[0]),
        auc=_mean_auc(scores, included, failure),
        cap=cap.area,
        rates=rates,
        rate_caps=caps,
    )


Half = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Scores of members and others on which a threshold is chosen, and of those on which it is judged.
"""


def _halved(scores: np.ndarray, included: np.ndarray) -> Half:
    even = np.arange(len(scores)) % 2 == 0
    parts = (scores[mask & half] for half in (even, ~even) for mask in (included, ~included))
    first, second, third, fourth = parts
    return first, second, third, fourth


def _detections(halves: Sequence[Half], rate: float, failure: float) -> Measured:
    found = total = 0
    for _, others, members, _ in halves:
        threshold = np.quantile(others, 1 - rate, method="higher")
        found += int((members > threshold).sum())
        total += len(members)
    return share(found, total, failure)


def _balanced(halves: Sequence[Half], failure: float) -> Measured:
    right = [0, 0]
    total = [0, 0]
    for members, others, judged_members, judged_others in halves:
        threshold = _best_threshold(members, others)
        right[0] += int((judged_members > threshold).sum())
        right[1] += int((judged_others <= threshold).sum())
        total[0] += len(judged_members)
        total[1] += len(judged_others)
    found = [share(*pair, failure / 2) for pair in zip(right, total, strict=True)]
    return Measured(*(sum(parts) / 2 for parts in zip(*found, strict=True)))


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
    known = {row.tobytes() for row in shadows.confidences}
    return any(row.tobytes() in known for row in targets.confidences)
