"""What the private step refuses: optimizers, releases and batches that do not fit its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ownerwise.batches import (
    Batch,
    row_counts,
)
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.mechanisms import (
    ClippingRule,
    Release,
    Steering,
)
from ownerwise.mechanisms.constraints import RateConstraints
from ownerwise.planning import (
    Plan,
)


def optimizer_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yield what keeps the optimizer from working with private gradients."""
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS calls the model several times a step, each un-noised; use SGD or Adam"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := held - set(names):
        yield (
            f"the optimizer holds {len(foreign)} parameters that are not the model's; build it "
            "from model.parameters()"
        )
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    held_names = {name for name, parameter in model.named_parameters() if id(parameter) in held}
    if unheld := [name for name in trainable if name not in held_names]:
        yield (
            f"{name_some(unheld)} can be trained but the optimizer does not hold it; add it, or "
            "freeze it (requires_grad_(False))"
        )


def release_problems(
    rule: ClippingRule, steering: Steering | None, release: Release | None, plan: Plan
) -> Iterator[str]:
    """Yield where what is released besides the gradient is not what the plan pays for."""
    if release is not None and steering is not None:
        yield (
            f"{type(rule).__name__} releases a count to steer by, and a release was given too; "
            "the plan pays for one: leave the release out, or the rule's steering"
        )
    if steering is not None and plan.release_shares is not None:
        yield (
            f"{type(rule).__name__} counts every record as one, and the plan pays for a "
            "release to which some add less: make the plan with release_std=, no constraints="
        )
    if plan.release_std is not None and release is None and steering is None:
        yield (
            "no release was given and the plan pays for a release: give the constraints that it "
            "was made with (Trainer(..., constraints=), or release= of the step), or make the plan "
            "without constraints= and release_std="
        )
    if plan.release_std is None and isinstance(release, RateConstraints):
        yield (
            "constraints were given and the plan pays for no release: make it with the same "
            "constraints, ow.plan(..., constraints=)"
        )
    elif plan.release_std is None and (release is not None or steering is not None):
        what = "release was given" if steering is None else "count to steer by is released"
        yield f"a {what} and the plan pays for no release: make it with ow.plan(..., release_std=)"


def inputs_and_targets(batch: Batch) -> tuple[Any, Any]:
    """Return the two parts of a batch, one row per record in each, or say what is wrong."""
    data = batch.data
    if not (isinstance(data, tuple | list) and len(data) == 2):
        shape = f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__
        raise OwnerwiseError(
            f"a batch holds {shape}; expected (inputs, targets). Give the data as (X, y), or a "
            "Dataset or collate function that yields such pairs"
        )
    if row_counts(data) - {len(batch)}:
        raise OwnerwiseError(
            "a batch holds tensors with more or fewer rows than it has records; expected one row "
            "per record: no padding rows, no tables shared by the records"
        )
    return data[0], data[1]
