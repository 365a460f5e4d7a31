"""The one-run audit: lower bounds on epsilon for each budget group, from a single training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.audit.alike import begin_alike
from ownerwise.audit.bounds import GUESSES, by_curve, gaussian_estimate, guess, theorem
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.observation import MakeOptimizer, Observations, Training, observe
from ownerwise.audit.plan_comparison import judged
from ownerwise.audit.rates import auc
from ownerwise.audit.results import Audit, GroupAudit
from ownerwise.audit.trade_off import TradeOff
from ownerwise.batches import arrays_of, shared_rows
from ownerwise.errors import OwnerwiseError, known_names
from ownerwise.mechanisms import ClippingRule, Loss, Release, Weights
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream
from ownerwise.randomness.noise import standard_normal

FAILURE = 0.05
"""Probability, over all groups, that any lower bound of one method is wrong, or any interval of one
rate misses its value."""

ATTACKS: dict[str, Callable[[Observations], np.ndarray]] = {
    "white-box": lambda seen: seen.scores,
    "loss": lambda seen: -_losses(seen)[1],
    "loss difference": lambda seen: _losses(seen)[0] - _losses(seen)[1],
}
"""The attacks: from what is seen of a run to one score per canary."""


def one_run(
    model: nn.Module | None,
    plan: Plan,
    data: Any = None,
    *,
    canaries: int = 1000,
    attack: str = "white-box",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    weights: Weights | None = None,
    clipping: ClippingRule | None = None,
    release: Release | None = None,
    canary_records: tuple[Tensor, Tensor] | None = None,
    guesses: float = GUESSES,
    failure: float = FAILURE,
    stream: SecretStream | None = None,
) -> Audit:
    """Train once with canaries, and return lower bounds on epsilon for each budget group.

    A copy of the model trains from its present state under the plan, with canaries among the
    records; the trained copy is discarded. A fair coin decides whether each canary takes part, and
    the attacker guesses the coins. White-box, the attacker sees the model after every step, and
    each canary has a gradient of its own: no attacker can do much better. Black-box ("loss", "loss
    difference"), the canaries are ordinary records, and the attacker sees only the trained model.

    Several processes (torch.distributed) make one audit together, and all of them return the same
    result: call it in each, with the same arguments.

    With a model, the audit is NOT private: its training uses all records once more, and no budget
    pays for it. With `model=None`, the canaries train alone, and no record takes part.

    Formal guarantee: with probability at least 1 - `failure`, no lower bound "any mechanism"
    exceeds the epsilon of the audited run in any group (Steinke, Nasr, Jagielski 2023), and no
    lower bound "plan's curve" does if the run's trade-off curve is that of the plan with some other
    amount of noise (Mahloujifar, Melis, Chaudhuri 2024). Estimates have no guarantee.

    Args:
        model: the network, or None.
        plan: the plan, with owners.
        data: as for `PoissonBatches`, one row per record of the plan.
        canaries: number of canaries, spread evenly over the budgets, of which at most four are
            audited: the strictest, the laxest, and some in between.
        attack: one of `ATTACKS`.
        loss: the loss; by default cross-entropy.
        optimizer: makes the optimizer from parameters; by default SGD with learning rate 0.1.
        weights, clipping, release: as for `PrivateStep`.
        canary_records: inputs and targets of black-box canaries, one per canary; not of people. By
            default, normal inputs and random targets.
        guesses: fraction of the canaries for which the attacker guesses.
        failure: probability, over all groups, that a bound of one method is wrong, or an interval
            misses its value.
        stream: the source of randomness; by default a new private stream.
    """
    processes = Processes.here()
    stream = SecretStream() if stream is None else stream
    if model is not None and loss is None:
        loss = functional.cross_entropy

    def checked() -> Training:
        if problems := list(_problems(model, attack, guesses, failure)):
            raise OwnerwiseError(problems)
        return Training(model, data, loss, optimizer, weights, clipping, release)

    training = processes.together(checked)
    settings = {
        "model": training.alone, "canaries": canaries, "attack": attack, "guesses": guesses,
        "failure": failure, "canary_records": canary_records,
    }  # fmt: skip
    begin_alike(processes, plan, stream, settings)

    def of_plan() -> Canaries:
        ordered = weights is not None and attack == "white-box"
        found = Canaries.of(plan, canaries, stream, alone=training.alone, ordered=ordered)
        if attack == "white-box":
            return found
        records = canary_records
        records = _random_records(data, canaries, stream) if records is None else records
        return found.with_records(records)

    made = processes.together(of_plan)
    if not training.alone:
        shared_rows(processes, data, plan)
    seen = observe(made, training, stream)
    groups = audited_groups(seen, ATTACKS[attack](seen), guesses, failure)
    compared = judged(seen, training) if attack == "white-box" else None
    return Audit(
        attack=attack,
        plan=plan.hash,
        steps=plan.steps,
        failure=failure,
        groups=groups,
        alarms=() if compared is None else tuple(compared.alarms),
        compared=0 if compared is None else len(compared.checks),
        private=training.alone,
    )


def _problems(
    model: nn.Module | None, attack: str, guesses: float, failure: float
) -> Iterator[str]:
    """Yield what is wrong with the arguments."""
    if attack not in ATTACKS:
        yield f"attack is {attack!r}; {known_names(attack, ATTACKS)}"
    elif attack != "white-box" and model is None:
        yield f"attack {attack!r} needs a model and its data"
    if not 0 < guesses <= 1 or not 0 < failure < 1:
        yield f"guesses={guesses:g} and failure={failure:g}: expected fractions between 0 and 1"


def audited_groups(
    seen: Observations, scores: np.ndarray, guesses: float = GUESSES, failure: float = FAILURE
) -> list[GroupAudit]:
    """Return the result for each group; the groups share the probability of failure."""
    lost = int((~np.isfinite(scores)).sum())
    if lost:
        raise OwnerwiseError(
            f"{lost} of {len(scores)} canaries have a score that is not finite: the audited "
            "training diverged, so nothing can be concluded. Lower the learning rate"
        )
    count = len(seen.canaries.groups)
    return [_audited(seen, scores, group, guesses, failure / count) for group in range(count)]


@lru_cache(maxsize=512)
def _curve(plan: Plan, owner: int, noise: float) -> TradeOff:
    return TradeOff.of(plan, owner, noise)


def _audited(
    seen: Observations, scores: np.ndarray, number: int, share: float, failure: float
) -> GroupAudit:
    """Return the result for one group."""
    canaries, plan = seen.canaries, seen.canaries.plan
    members = canaries.members(number)
    scores, included = scores[members], canaries.included[members]
    owner = int(canaries.owner[members[0]])
    delta = float(plan.deltas[owner])

    def curve_at(noise: float) -> TradeOff:
        return _curve(plan, owner, noise)

    made = guess(scores, included, share)
    return GroupAudit(
        name=canaries.groups[number],
        promised=float(plan.targets[owner]),
        delta=delta,
        members=len(members),
        guesses=made.made,
        right=made.right,
        bounds={
            "any mechanism": theorem(made, delta, failure),
            "plan's curve": by_curve(made, curve_at, delta, failure),
        },
        estimate=gaussian_estimate(scores, included, delta, failure),
        auc=auc(scores[included], scores[~included], failure),
        cap=curve_at(1.0).area,
    )


def _losses(seen: Observations) -> np.ndarray:
    assert seen.losses is not None
    return seen.losses


def _random_records(data: Any, count: int, stream: SecretStream) -> tuple[Tensor, Tensor]:
    """Return normal inputs and random classes, in the shapes of the data."""
    arrays = arrays_of(data)
    pair = () if arrays is None else tuple(torch.as_tensor(part) for part in arrays)
    if len(pair) != 2 or not pair[0].is_floating_point() or pair[1].is_floating_point():
        raise OwnerwiseError(
            "black-box canaries are made up for floating-point inputs with a class each: pass "
            "canary_records=(inputs, targets), made up or public"
        )
    inputs, targets = pair
    shape, classes = inputs.shape[1:], int(targets.max()) + 1
    draws = stream.child("canary records").at_step(0)
    chosen = torch.from_numpy(draws.integers(classes, count)).to(targets.dtype)
    normal = standard_normal(draws, count * math.prod(shape))
    return normal.view(count, *shape).to(inputs.dtype), chosen
