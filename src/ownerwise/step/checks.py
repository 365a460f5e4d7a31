"""Checks on the optimizer, the release and the batches of a private step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ownerwise.batches import Batch, Unloaded, device_of, moved, row_counts, take
from ownerwise.errors import OwnerwiseError, PlanError, name_some
from ownerwise.gradients import evaluation_mode
from ownerwise.mechanisms import (
    ClippingRule,
    Closing,
    Loss,
    RegressionLoss,
    Release,
    Steering,
    Weights,
    plain_loss,
)
from ownerwise.mechanisms.target_checks import run_on_first, target_problems
from ownerwise.planning import Plan
from ownerwise.processes import Processes
from ownerwise.repair import PullAdjustment

NO_BATCH = (
    "got {}; expected a Batch, as in `for batch in PoissonBatches(data, plan): step(batch)`: "
    "PoissonBatches samples at the owners' rates, which a DataLoader does not"
)


def optimizer_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yield the reasons why the optimizer cannot be used with private gradients."""
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS evaluates the model several times per step, without noise; use SGD or Adam"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := held - set(names):
        yield (
            f"the optimizer has parameters that do not belong to the model ({len(foreign)} of "
            "them); build it from model.parameters()"
        )
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    held_names = {name for name, parameter in model.named_parameters() if id(parameter) in held}
    if unheld := [name for name in trainable if name not in held_names]:
        yield (
            f"the optimizer lacks the trainable parameters {name_some(unheld)}; add or freeze them "
            "(requires_grad_(False))"
        )


def plug_problems(**plugs: Any) -> Iterator[str]:
    """Yield a problem for every plug that is not an object of the required kind."""
    kinds = {
        "weights": (Weights, "ow.INO()"),
        "clipping": (ClippingRule, "ow.AutoS()"),
        "release": (Release, "ow.RateConstraints(...)"),
        "calibration": (Closing, "ow.Calibration()"),
        "repair": (PullAdjustment, "ow.PullAdjustment(tau=1.0, counts=counts)"),
    }
    for name, plug in plugs.items():
        kind, example = kinds[name]
        if plug is not None and not isinstance(plug, kind):
            shown = repr(plug) if isinstance(plug, str) else f"<{type(plug).__name__} object>"
            shown = plug.__name__ if isinstance(plug, type) else shown
            room = kind.__module__.rpartition(".")[0]
            yield (
                f"{name}={shown}: expected an object, such as {example}, derived from "
                f"{room}.{kind.__name__}, or None"
            )


def release_problems(
    rule: ClippingRule, steering: Steering | None, release: Release | None, plan: Plan
) -> Iterator[str]:
    """Yield each mismatch between the additional release and the one the plan accounts for."""
    if plan.adaptive_clip_norm is not None:  # see `adaptive_problems` for the rule
        if release is not None:
            yield (
                "the plan's adaptive clip norm releases a number at every step and another release "
                "was passed, but the plan accounts for only one: remove the release, or plan with "
                "a fixed clip_norm"
            )
        return
    if release is not None and steering is not None:
        yield (
            f"{type(rule).__name__} releases a count for its steering and another release was "
            "passed, but the plan accounts for only one: remove the release or the rule's steering"
        )
    if steering is not None and plan.release_shares is not None:
        yield (
            f"{type(rule).__name__} counts every record as one, but the plan accounts for a "
            "release to which some records contribute less: make the plan with release_std= and "
            "without constraints="
        )
    if plan.release_std is not None and release is None and steering is None:
        yield (
            "the plan accounts for a release, but none was passed: pass the constraints the plan "
            "was made with (Trainer(..., constraints=), or the step's release=), or make the plan "
            "without constraints= and release_std="
        )
    if plan.release_std is None and release is not None:
        yield (
            f"{type(release).__name__} was passed, but the plan does not account for a release: "
            f"make the plan with {release.planned_with}"
        )
    elif plan.release_std is None and steering is not None:
        yield (
            "the steering releases a count, but the plan does not account for a release: make the "
            "plan with ow.plan(..., release_std=)"
        )


def repair_problems(
    repair: PullAdjustment | None, weights: Weights | None, release: Release | None, plan: Plan
) -> Iterator[str]:
    """Yield the reasons why a repair does not fit the plan or the other plugs."""
    if repair is not None:
        names = (None if plug is None else type(plug).__name__ for plug in (weights, release))
        yield from repair.problems(plan, *names)


def individual_problems(
    rule: ClippingRule,
    weights: Weights | None,
    repair: PullAdjustment | None,
    plan: Plan,
    processes: Processes,
) -> Iterator[str]:
    """Yield the reasons why the plugs cannot be combined with individual accounting."""
    if plan.filter is None:
        return
    if processes.several:
        yield (
            f"{processes.count} processes with individual accounting: expected one process, which "
            "knows what each record has spent"
        )
    if weights is not None:
        yield (
            f"{type(weights).__name__} with individual accounting: expected no weights, because a "
            "record with a gradient of 0, which is charged next to nothing, still changes the "
            "weights of the others by up to a whole clip norm"
        )
    if rule.randomised or rule.steering(plan) is not None:
        yield (
            f"{type(rule).__name__} with individual accounting: expected a clipping rule without "
            "random choices, because an accepted record counts with its whole clip norm, whatever "
            "its own norm is"
        )
    if repair is not None:
        yield (
            "repair with individual accounting: expected none, because the pull of an owner "
            "depends on when their records retire, which is private"
        )


def regression_problems(loss: Loss, repair: PullAdjustment | None, plan: Plan) -> Iterator[str]:
    """Yield what only a classifier can use, if the loss is that of a regression."""
    plain = plain_loss(loss)
    given = {
        "calibration": (plan.closing_std is not None, "plan without calibration="),
        "repair": (repair is not None, "leave it out"),
        "constraints": (plain is not loss, "plan and train without constraints="),
    }
    if isinstance(plain, RegressionLoss):
        yield from (
            f"{name} with a RegressionLoss: it applies to classes, and a regression has none; "
            f"{remedy}"
            for name, (is_given, remedy) in given.items()
            if is_given
        )


def refuse_unplanned(batch: Any, step: int, plan: Plan) -> None:
    """Raise an error unless this is the plan's batch for the next step, number `step`."""
    if not isinstance(batch, Batch):
        raise OwnerwiseError(NO_BATCH.format(f"a {type(batch).__name__}"))
    if step >= plan.steps:
        raise PlanError(
            f"all {plan.steps} planned steps have been taken; another one would exceed the "
            "budgets. Make a plan with more steps"
        )
    if batch.step != step:
        raise PlanError(
            f"the batch is for step {batch.step}, but the next step is {step}: use every batch "
            "of PoissonBatches once and in order (PoissonBatches(..., start=) when resuming)"
        )
    if batch.plan_hash not in (None, plan.hash):
        raise PlanError(
            f"the batch was drawn with plan {batch.plan_hash[:12]}, but the step accounts for "
            f"plan {plan.hash[:12]}: pass the step's plan to PoissonBatches"
        )


def refuse_unshared(batch: Batch, processes: Processes) -> None:
    """Raise an error unless a batch was divided among these processes, if there are several."""
    processes.refuse_another_group()
    divided = 1 if batch.share is None else batch.share.processes.count
    if divided != processes.count:
        raise OwnerwiseError(
            f"the batch is for {divided} processes, but the step is taken by {processes.count}: "
            "initialise the process group before PoissonBatches and the step are created, and do "
            "not make batches by hand"
        )


def refuse_unloaded(batch: Batch) -> None:
    """Raise an error if a batch's records could not be loaded; the step already counts as spent."""
    if isinstance(batch.data, Unloaded):
        raise OwnerwiseError(
            f"the records of step {batch.step} could not be loaded ({batch.data.error}), and the "
            "step counts as spent. Which records a batch contains is private, so this message "
            "names none of them: try dataset[i] for every record, and collate, outside a private "
            "run. The fact that loading failed is itself not private: no guarantee covers it"
        )


def refuse_unusable(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise an error if the model or the loss does not accept the dtypes or shapes of a batch."""
    first = take(inputs_and_targets(batch), list(range(min(2, len(batch)))))
    inputs, targets = moved(first, device_of(model))
    with evaluation_mode(model):
        outputs = run_on_first(model, inputs)
    if problems := target_problems(loss, outputs, targets):
        raise OwnerwiseError(problems)


def inputs_and_targets(batch: Batch) -> tuple[Any, Any]:
    """Return a batch's inputs and targets; raise an error unless they have one row per record."""
    data = batch.data
    if not (isinstance(data, tuple | list) and len(data) == 2):
        shape = f"a {type(data).__name__}"
        if isinstance(data, tuple | list):
            shape += f" of length {len(data)}"
        raise OwnerwiseError(
            f"a batch contains {shape}; expected (inputs, targets). Pass the data as (X, y), or "
            "use a Dataset or collate function that yields such pairs"
        )
    if row_counts(data) - {len(batch)}:
        raise OwnerwiseError(
            "a batch contains tensors with more or fewer rows than records; expected one row per "
            "record, without padding rows or tables shared between records"
        )
    return data[0], data[1]
