"""Before training, build everything a run needs, check it, and list all problems."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.batches import (
    COLLATE_NEEDS_DATASET,
    Collate,
    arrays_of,
    data_problems,
    device_problems,
    ownerless_problems,
)
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems
from ownerwise.evaluation import Evaluation, trial_problems
from ownerwise.gradients import check
from ownerwise.marks import mark, marks_of
from ownerwise.mechanisms import loss_problems, plain_loss
from ownerwise.planning import Plan, hardened_or
from ownerwise.processes import Processes
from ownerwise.randomness import SecretStream
from ownerwise.repair import shifted
from ownerwise.runs import HISTORY, describe_function, folder_problems
from ownerwise.step import PrivateStep
from ownerwise.step.checks import plug_problems
from ownerwise.training.held_out import shared_owner_problems
from ownerwise.training.loggers import JsonLines, Logger, make_loggers
from ownerwise.training.settings import RULES, TrainerSettings

LARGEST_INPUT = 100.0
"""The Trainer warns about rounding if the absolute value of an input exceeds this limit.

See docs/proofs/arithmetic.md.
"""


def prepare(
    settings: TrainerSettings,
    data: Any,
    collate: Collate | None,
    evaluated: Mapping[str, Evaluation | None],
    config: dict[str, Any],
    resume: bool,
) -> tuple[PrivateStep, SecretStream, list[Logger]]:
    """Return the step, stream and loggers for a run, or raise an error that lists all problems.

    `evaluated` maps "validation" and "test" to what is evaluated, if anything. The first of several
    processes writes the folder and has all loggers.
    """
    problems = Problems()
    problems.add(*_run_problems(settings, resume), *settings.problems())
    stream = SecretStream()
    if settings.seed is not None and RULES["seed"].fits(settings.seed):
        stream = SecretStream.from_seed(settings.seed)
    if not device_problems(settings.device):
        _move(settings)
    step = None
    with problems.guard():
        step = _make_step(settings, stream)
    problems.add(*_data_problems(settings, data, collate, trial=step is not None))
    for name, evaluation in evaluated.items():
        if evaluation is not None:
            found = evaluation.problems(name)
            found = found or shared_owner_problems(settings.plan, evaluation, name)
            if step is not None and not found:
                found = evaluation.trial_problems(settings.model, settings.loss, name)
            problems.add(*found)
    processes = Processes.here()
    loggers = make_loggers(settings.loggers if processes.first else (), problems)
    if settings.path is not None and processes.first:
        loggers.insert(0, JsonLines(settings.path / HISTORY))
        problems.add(*folder_problems(settings.path, config, settings.plan, resume))
    processes.together(problems.raise_)
    assert step is not None
    _warn_of_large_inputs(data, settings.plan)
    _warn_of_counted_labels(settings, data)
    return step, stream, loggers


def _run_problems(settings: TrainerSettings, resume: bool) -> Iterator[str]:
    if settings.runs and not (resume and settings.path):
        yield (
            "this Trainer has already trained its model, and another run would spend the budgets "
            "again: create a new model and a Trainer for it"
        )
    if settings.plan.tuning is not None and not settings.in_search:
        yield (
            "the plan is the plan of a search, which is spent with the search: its epsilons do not "
            "cover another run, nor more steps; make a new plan"
        )
    if resume and settings.path is None:
        yield "resume=True needs the folder of the run: Trainer(..., folder=)"


def _move(settings: TrainerSettings) -> None:
    """Move the model, and a loss that is a module, to the device for training."""
    if settings.device is not None:
        reasons = marks_of(settings.model)
        settings.model.to(settings.device)
        if reasons:  # marks of parameters belong to the memory that these have left
            mark(settings.model, *reasons)
        if isinstance(loss := plain_loss(settings.loss), nn.Module):
            loss.to(settings.device)


def _make_step(settings: TrainerSettings, stream: SecretStream) -> PrivateStep:
    """Return the private step, or raise an error that lists all problems."""
    model, loss = settings.model, settings.loss
    problems = list(_plug_problems(settings))
    optimizer = None
    lr = settings.lr if RULES["lr"].fits(settings.lr) else 1.0  # reported already
    if not problems:
        try:
            options = dict(settings.optimizer_options or {})
            optimizer = settings.optimizer(model.parameters(), lr=lr, **options)
        except (TypeError, ValueError) as error:
            problems.append(f"optimizer {describe_function(settings.optimizer)}: {error}")
    if optimizer is None:
        raise OwnerwiseError([*problems, *map(str, check(model)), *loss_problems(loss, model)])
    return PrivateStep(
        model,
        settings.plan,
        optimizer,
        loss,
        weights=settings.weights,
        clipping=settings.clipping,
        release=settings.constraints,
        calibration=settings.calibration,
        repair=settings.repair,
        stream=stream,
        performance=settings.performance,
    )


def _plug_problems(settings: TrainerSettings) -> Iterator[str]:
    """Yield a problem if the optimizer, loss, weights or clipping rule has the wrong type."""
    optimizer, loss = settings.optimizer, plain_loss(settings.loss)
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
    yield from plug_problems(weights=settings.weights, clipping=settings.clipping)


def _short(given: Any) -> str:
    if isinstance(given, str):
        return repr(given)
    return getattr(given, "__name__", f"<{type(given).__name__} object>")


def _data_problems(
    settings: TrainerSettings, data: Any, collate: Collate | None, *, trial: bool
) -> list[str]:
    """Return the problems with the training data; with `trial`, try one batch if there are none."""
    problems = ownerless_problems(settings.plan)
    problems = problems or _training_data_problems(data, collate, settings.plan)
    if not trial or problems:
        return problems
    repair = settings.repair

    def then(outputs: Any, targets: Any) -> None:
        if repair is not None:
            shifted(outputs, repair.shift(settings.plan))

    return trial_problems(settings.model, settings.loss, data, collate, "the data", then)


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
        if not (_on_disk(array) or _all_finite(array))
    ]


def _warn_of_large_inputs(data: Any, plan: Plan) -> None:
    """Warn if the plan is not hardened and inputs are so large that rounding may reveal records.

    Only arrays in memory are checked: a Dataset would have to be loaded in full.
    """
    arrays = arrays_of(data)
    if plan.hardened_rows is not None or arrays is None or _on_disk(arrays[0]):
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
            "change the rounding of other records: "
            + hardened_or(plan.unit, "scale the inputs by public constants"),
            PrivacyWarning,
            stacklevel=4,
        )


def _warn_of_counted_labels(settings: TrainerSettings, data: Any) -> None:
    """Warn if a repair's label counts are those of the training labels.

    Only arrays are checked: a Dataset would have to be loaded in full.
    """
    arrays = arrays_of(data)
    if settings.repair is not None and arrays is not None:
        settings.repair.warn_if_counted(settings.plan, arrays[1])


def _on_disk(array: Tensor | np.ndarray) -> bool:
    """Return whether an array is memory-mapped: reading it all may take hours."""
    return isinstance(array, np.memmap)


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
