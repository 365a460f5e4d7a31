"""Before training, build everything a run needs, check it, and list all problems."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.batches import COLLATE_NEEDS_DATASET, arrays_of, data_problems, ownerless_problems
from ownerwise.errors import PrivacyWarning, Problems
from ownerwise.evaluation import Collate, Evaluation, trial_problems
from ownerwise.gradients import check
from ownerwise.mechanisms import (
    ClippingRule,
    Loss,
    Release,
    Weights,
    loss_problems,
    plain_loss,
)
from ownerwise.planning import Plan
from ownerwise.randomness import SecretStream
from ownerwise.runs import HISTORY, describe_function, folder_problems
from ownerwise.step import PrivateStep
from ownerwise.step.checks import plug_problems
from ownerwise.training.averaging import averaging_problems
from ownerwise.training.learning_rates import LearningRateSchedule, schedule_problems
from ownerwise.training.loggers import JsonLines, Logger, make_loggers

LARGEST_INPUT = 100.0
"""The Trainer warns about rounding if the absolute value of an input exceeds this limit.

See docs/proofs/arithmetic.md.
"""


class TrainerSettings(Protocol):
    """The Trainer settings that are checked here; see `Trainer` for their meaning."""

    model: nn.Module
    plan: Plan
    lr: float
    optimizer: Callable[..., Optimizer]
    optimizer_options: dict[str, Any]
    schedule: LearningRateSchedule
    averaging: float | None
    loss: Loss
    weights: Weights | None
    clipping: ClippingRule | None
    constraints: Release | None
    micro_batch_size: int | None
    lean: bool
    seed: int | None
    folder: Path | None
    evaluate_every: int
    checkpoint_every: int
    group_budgets: Mapping[Any, float] | None
    loggers: Sequence[str | Logger]
    begun: bool


def prepare(
    trainer: TrainerSettings,
    data: Any,
    collate: Collate | None,
    validation: Evaluation | None,
    test: Evaluation | None,
    config: dict[str, Any],
    resume: bool,
) -> tuple[PrivateStep, SecretStream, list[Logger]]:
    """Return the step, stream and loggers for a run, or raise an error that lists all problems."""
    problems = Problems(_setting_problems(trainer, resume))
    problems += schedule_problems(trainer.schedule, trainer.plan.steps)
    problems += averaging_problems(trainer.averaging)
    stream = SecretStream() if trainer.seed is None else _seeded(trainer.seed, problems)
    step = _make_step(trainer, stream, problems)
    of_data = ownerless_problems(trainer.plan)
    of_data = of_data or _training_data_problems(data, collate, trainer.plan)
    if step is not None and not of_data:
        of_data = trial_problems(trainer.model, trainer.loss, data, collate, "the data")
    problems += of_data
    for name, evaluation in (("validation", validation), ("test", test)):
        if evaluation is not None:
            of_data = evaluation.problems(name)
            if step is not None and not of_data:
                of_data = evaluation.trial_problems(trainer.model, trainer.loss, name)
            problems += of_data
    loggers = make_loggers(trainer.loggers, problems)
    if trainer.folder is not None:
        loggers.insert(0, JsonLines(trainer.folder / HISTORY))
        problems += folder_problems(trainer.folder, config, trainer.plan, resume)
    problems.raise_()
    assert step is not None
    _warn_of_large_inputs(data, trainer.plan)
    return step, stream, loggers


def _make_step(
    trainer: TrainerSettings, stream: SecretStream, problems: Problems
) -> PrivateStep | None:
    """Return the private step, or add problems to the list and return None."""
    model, loss = trainer.model, trainer.loss
    if wrong := list(_plug_problems(trainer)):
        problems += [*wrong, *map(str, check(model)), *loss_problems(loss, model)]
        return None
    try:
        optimizer = trainer.optimizer(
            model.parameters(), lr=trainer.lr, **trainer.optimizer_options
        )
    except (TypeError, ValueError) as error:
        problems.add(f"optimizer {describe_function(trainer.optimizer)}: {error}")
        problems += [*map(str, check(model)), *loss_problems(loss, model)]
        return None
    with problems.guard():
        return PrivateStep(
            model,
            trainer.plan,
            optimizer,
            loss,
            weights=trainer.weights,
            clipping=trainer.clipping,
            release=trainer.constraints,
            stream=stream,
            micro_batch_size=trainer.micro_batch_size,
            lean=trainer.lean,
        )
    return None


def _plug_problems(trainer: TrainerSettings) -> Iterator[str]:
    """Yield a problem if the optimizer, loss, weights or clipping rule has the wrong type."""
    optimizer, loss = trainer.optimizer, plain_loss(trainer.loss)
    if not callable(optimizer):
        kind = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "Adam"
        yield (
            f"optimizer={_short(optimizer)}: expected a class, such as torch.optim.{kind}; the "
            "Trainer calls it with the parameters, lr= and optimizer_options="
        )
    if not callable(loss) or inspect.isclass(loss):
        yield (
            f"loss={_short(loss)}: expected a function, such as "
            "torch.nn.functional.cross_entropy, or an object, such as torch.nn.CrossEntropyLoss()"
        )
    yield from plug_problems(weights=trainer.weights, clipping=trainer.clipping)


def _short(given: Any) -> str:
    if isinstance(given, str):
        return repr(given)
    return getattr(given, "__name__", f"<{type(given).__name__} object>")


def _seeded(seed: Any, problems: Problems) -> SecretStream:
    try:
        return SecretStream.from_seed(seed)
    except TypeError:
        problems.add(
            f"seed={seed!r}: expected None (secret randomness), or a whole number, which makes the "
            "run NOT private"
        )
        return SecretStream()


def _setting_problems(trainer: TrainerSettings, resume: bool) -> Iterator[str]:
    if trainer.begun and not (resume and trainer.folder):
        yield (
            "this Trainer has already trained its model, and another run would spend the budgets "
            "again: create a new model and a Trainer for it"
        )
    if resume and trainer.folder is None:
        yield "resume=True needs the folder of the run: Trainer(..., folder=)"
    if not (isinstance(trainer.lr, int | float) and 0 < trainer.lr < math.inf):
        yield f"lr={trainer.lr!r}: expected a positive finite number"
    for name in ("evaluate_every", "checkpoint_every"):
        value = getattr(trainer, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name}={value!r}: expected a whole number of at least 1"
    for group, epsilon in (trainer.group_budgets or {}).items():
        if not (isinstance(epsilon, int | float) and 0 < epsilon < math.inf):
            yield f"group_budgets: {group!r} has {epsilon!r}; expected a positive finite epsilon"


def _training_data_problems(data: Any, collate: Collate | None, plan: Plan) -> list[str]:
    assert plan.owners is not None
    index = plan.owners.record_owner_index
    assert index is not None
    problems = data_problems(data, len(index))
    arrays = arrays_of(data)
    if arrays is None or problems:
        return problems
    if len(arrays) != 2:
        return [f"the data has {len(arrays)} arrays; expected two, (X, y)"]
    if collate is not None and arrays is data:
        return [COLLATE_NEEDS_DATASET]
    return [
        f"array {number} in the data contains NaN or infinite values: remove or replace them"
        for number, array in enumerate(arrays)
        if not _all_finite(array)
    ]


def _warn_of_large_inputs(data: Any, plan: Plan) -> None:
    """Warn if the plan is not hardened and inputs are so large that rounding may reveal records.

    Only arrays are checked: a Dataset would have to be loaded in full.
    """
    arrays = arrays_of(data)
    if plan.hardened_rows is not None or arrays is None:
        return
    inputs = arrays[0]
    largest = 0.0
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind == "f" and inputs.size:
        largest = max(float(inputs.max()), -float(inputs.min()))
    elif isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.numel():
        largest = float(max(inputs.max(), -inputs.min()))
    if largest > LARGEST_INPUT:
        warnings.warn(
            f"some inputs are larger than {LARGEST_INPUT:g} in absolute value (this message is "
            "itself not private: no guarantee covers it). With such inputs, crafted records can "
            "change the rounding of other records. Scale the inputs by public constants, or plan "
            "with hardened=True",
            PrivacyWarning,
            stacklevel=4,
        )


def _all_finite(array: Tensor | np.ndarray) -> bool:
    """Return whether all values are finite.

    It is usually enough to check their sum, which needs no copy.
    """
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(array.sum(dtype=np.float64))
        return math.isfinite(total) or bool(np.isfinite(array).all())
    total = float(array.sum(dtype=torch.float64))
    return math.isfinite(total) or bool(torch.isfinite(array).all())
