"""What a step is made of, checked before the first batch, in one process or several.

Several processes must make the same step, and start from the same model: they take the tensors of
the first process, because each process may have initialised the model with other random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.errors import OwnerwiseError, PlanError, name_some
from ownerwise.gradients import check
from ownerwise.mechanisms import (
    ClippingRule,
    Closing,
    Loss,
    Plug,
    Release,
    Steering,
    Weights,
    adaptive_problems,
    loss_problems,
    steering_for,
)
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.repair import PullAdjustment
from ownerwise.step.checks import (
    individual_problems,
    optimizer_problems,
    plug_problems,
    regression_problems,
    release_problems,
    repair_problems,
)
from ownerwise.step.closing import closing_problems
from ownerwise.step.opening import opening_problems
from ownerwise.step.performance import Performance
from ownerwise.step.plug_states import settings_of
from ownerwise.step.rounding import rounding_problems
from ownerwise.step.wrappers import wrapper_problems

NO_CLOSING = (
    "the plan does not account for a release after training: make the plan with "
    "ow.plan(..., calibration=ow.Calibration())"
)


@dataclass(frozen=True)
class Setup:
    """The checked parts of a step.

    Attributes:
        plan: the step's own copy of the plan.
        steering: what adapts clip norms and rates, if anything.
        weights: the weights, bound to the plan, if any.
    """

    plan: Plan
    steering: Steering | None
    weights: Weights | None


def checked_setup(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer,
    loss: Loss,
    rule: ClippingRule,
    *,
    weights: Weights | None,
    release: Release | None,
    calibration: Closing | None,
    repair: PullAdjustment | None,
    performance: Performance,
    processes: Processes,
) -> Setup:
    """Return the parts of a step, or raise an error that lists all problems."""
    problems = [str(problem) for problem in check(model)]
    problems += wrapper_problems(model, optimizer, processes)
    problems += optimizer_problems(model, optimizer)
    problems += loss_problems(loss, model)
    plugs = {"weights": weights, "clipping": rule, "release": release}
    unusable = list(plug_problems(**plugs, calibration=calibration, repair=repair))
    if unusable:
        raise OwnerwiseError([*problems, *unusable])
    try:
        plan = Plan.verified(plan)  # not a derived class's method
    except PlanError as error:  # nothing else can be checked against such a plan
        raise OwnerwiseError([*problems, *error.problems]) from None
    steering = steering_for(plan, rule)
    problems += adaptive_problems(plan.adaptive_clip_norm, rule)
    problems += release_problems(rule, steering, release, plan)
    problems += individual_problems(rule, weights, repair, plan, processes)
    problems += repair_problems(repair, weights, release, plan)
    problems += regression_problems(loss, repair, plan)
    bound = None if weights is None else weights.bind(plan)
    problems += rounding_problems(plan, model, bound, release or steering, processes.count)
    if calibration is not None and plan.closing_std is None:
        problems.append(NO_CLOSING)
    problems += closing_problems(plan)
    problems += opening_problems(plan, model)
    problems += performance.problems()
    if problems:
        raise OwnerwiseError(problems)
    return Setup(plan, steering, bound)


def start_alike(
    processes: Processes,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    plugs: Mapping[str, Plug],
    *,
    not_private: bool,
) -> None:
    """Let all processes start from the model of the first, or raise an error if they differ."""
    if not processes.several:
        return
    groups = [
        {name: str(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    held = [(name, list(t.shape), str(t.dtype), t.requires_grad) for name, t in _tensors(model)]
    every = {name: (type(plug).__name__, plug.settings()) for name, plug in plugs.items()}
    described: dict[str, Any] = {
        "the plan": plan.hash,
        "the model": held,
        "the optimizer": (type(optimizer).__name__, groups),
        "the mechanisms": (every, settings_of(plugs)),
        "not_private": not_private,
    }
    found = processes.all_of(described)
    if differing := [name for name in described if any(o[name] != found[0][name] for o in found)]:
        raise OwnerwiseError(
            f"the processes differ in {name_some(differing)}: run the same script with the same "
            "data, plan and settings in all of them"
        )
    processes.from_first([tensor for _, tensor in _tensors(model)])


def take_state(processes: Processes, model: nn.Module, optimizer: Optimizer) -> None:
    """Let all processes continue from the model and the optimizer of the first."""
    if processes.several:
        processes.from_first([tensor for _, tensor in _tensors(model)])
        state = processes.on_first(optimizer.state_dict)
        if not processes.first:
            optimizer.load_state_dict(state)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
