"""The Trainer's settings, frozen and with defaults filled in, and the checks on their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from ownerwise.batches import Device, device_problems
from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation import Predict, predicted_classes
from ownerwise.mechanisms import ClippingRule, Closing, Loss, Release, Weights
from ownerwise.planning import NO_CONSTRAINTS, Plan
from ownerwise.repair import PullAdjustment
from ownerwise.runs import Run, default_label
from ownerwise.runs.settings import describe_plug
from ownerwise.step import Performance
from ownerwise.step.wrappers import unwrapped
from ownerwise.training.learning_rates import LearningRateSchedule, schedule_problems
from ownerwise.training.loggers import Logger
from ownerwise.training.values import POSITIVE, ValueRule, is_number, is_whole, whole

_EVALUATIONS = 20  # approximate default number per run

RULES: Mapping[str, ValueRule] = {
    "lr": POSITIVE,
    "averaging": ValueRule(
        "a decay of at least 0 and below 1, such as 0.99",
        lambda value: is_number(value) and 0 <= value < 1,
    ),
    "seed": ValueRule(
        "a whole number, which makes the run NOT PRIVATE; leave it out for private data", is_whole
    ),
    "evaluate_every": whole(1),
    "checkpoint_every": whole(1),
}
"""Rules for the values of settings. Except for `lr`, None means that a setting was not given."""


@dataclass(frozen=True, eq=False, repr=False)
class TrainerSettings:
    """The arguments of `Trainer`; see there for their meaning."""

    in_search: ClassVar[bool] = False
    """Whether the run is one of a search, whose plan no other run may use."""

    model: nn.Module
    plan: Plan
    _: KW_ONLY
    lr: float
    optimizer: Callable[..., Optimizer] = torch.optim.SGD
    optimizer_options: Mapping[str, Any] | None = None
    schedule: LearningRateSchedule = "constant"
    averaging: float | None = None
    loss: Loss = functional.cross_entropy
    weights: Weights | None = None
    clipping: ClippingRule | None = None
    constraints: Release | None = None
    calibration: Closing | None = None
    repair: PullAdjustment | None = None
    performance: Performance = field(default_factory=Performance)
    device: Device | None = None
    seed: int | None = None
    folder: str | PathLike | None = None
    name: str | None = None
    label: str | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    group_budgets: Mapping[Any, float] | None = None
    predict: Predict = predicted_classes
    loggers: Sequence[str | Logger] = ()
    progress: bool | None = None
    notes: Mapping[str, Any] | None = None
    runs: list[Run] = field(default_factory=list, init=False)
    """The runs that this Trainer has begun; one at most, unless it is resumed."""

    def __post_init__(self) -> None:
        """Fill in the defaults that follow from other settings."""
        if self.constraints is not None and not isinstance(self.constraints, Release):
            raise OwnerwiseError(NO_CONSTRAINTS.format(self.constraints))
        label = default_label(self.plan, describe_plug(self.weights))
        label += "" if self.constraints is None else " constrained"
        label += "" if self.plan.adaptive_clip_norm is None else " adaptive clip norm"
        label += "" if self.plan.opening_std is None else " paid statistics"
        label += "" if self.plan.closing_std is None else " calibrated"
        label += "" if self.repair is None else " adjusted"
        every = self.evaluate_every
        every = max(1, self.plan.steps // _EVALUATIONS) if every is None else every
        vars(self).update(
            model=unwrapped(self.model),
            folder=self.path,
            optimizer_options=dict(self.optimizer_options or {}),
            loss=self.loss if self.constraints is None else self.constraints.penalised(self.loss),
            name=self.name or (self.path.resolve().name if self.path else "run"),
            label=self.label or label,
            evaluate_every=every,
            checkpoint_every=every if self.checkpoint_every is None else self.checkpoint_every,
            notes=dict(self.notes or {}),
        )

    @cached_property
    def path(self) -> Path | None:
        """The run folder."""
        return None if self.folder is None else Path(self.folder)

    def problems(self) -> list[str]:
        """Return all problems with values that can be checked without the data."""
        return [
            *setting_problems({name: getattr(self, name) for name in RULES}),
            *(
                f"group_budgets: {group!r} has {epsilon!r}; expected {POSITIVE.expected}"
                for group, epsilon in (self.group_budgets or {}).items()
                if not POSITIVE.fits(epsilon)
            ),
            *schedule_problems(self.schedule, self.plan.steps),
            *device_problems(self.device),
        ]


def setting_problems(given: Mapping[str, Any]) -> list[str]:
    """Return a problem that starts with the setting's name for each value that breaks a rule."""
    return [
        rule.problem(name, given[name])
        for name, rule in RULES.items()
        if name in given and not (given[name] is None and name != "lr")
        if not rule.fits(given[name])
    ]
