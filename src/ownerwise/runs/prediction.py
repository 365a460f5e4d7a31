"""Predictions of a trained model, with or without a repair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation import run_on_first
from ownerwise.gradients import evaluation_mode
from ownerwise.planning import Plan
from ownerwise.repair import PullAdjustment, shifted

_RECORDS_AT_ONCE = 512
_ROUNDOFF = 1e-9  # a shift that was stored and one that is computed again may differ by less

NO_MODEL = (
    "the run does not know its model: build the same network as in training, and load the run with "
    "Run.load(folder, model=network)"
)


def class_outputs(model: nn.Module, inputs: Tensor | np.ndarray, shift: Tensor | None) -> Tensor:
    """Return the model's outputs minus a shift, [records, classes] or single logits."""
    rows = model_inputs(model, inputs)
    with evaluation_mode(model):
        if len(rows):
            run_on_first(model, rows[:2])
        parts = [model(part) for part in rows.split(_RECORDS_AT_ONCE)]
    outputs = torch.cat(parts)
    return outputs if shift is None else shifted(outputs, -shift)


def remaining_shift(
    config: Mapping[str, Any], plan: Plan, repair: PullAdjustment | None
) -> Tensor | None:
    """Return the shift to subtract from a run's outputs, less the shift used in training.

    A run that was trained with the same repair needs nothing more.

    Args:
        config: the run's settings.
        plan: the run's plan.
        repair: the correction that the predictions should have.
    """
    if repair is None:
        return None
    if not isinstance(repair, PullAdjustment):
        raise OwnerwiseError(
            f"repair={repair!r}: expected an object such as ow.PullAdjustment(tau=1.0, "
            "counts=counts), or None"
        )
    weights = (config.get("weights") or {}).get("kind")
    release = "rate constraints" if config.get("constraints") else None
    if problems := list(repair.problems(plan, weights, release)):
        raise OwnerwiseError(problems)
    shift = repair.shift(plan)
    if (trained := config.get("repair")) is not None:
        shift = shift - torch.tensor(trained["shift"], dtype=shift.dtype)
    if float(shift.abs().max()) < _ROUNDOFF:
        return None
    if plan.closing_std is not None:
        raise OwnerwiseError(
            "this run was calibrated, which takes out the tilt as measured; a shift from counts "
            "would correct it twice: predict without repair="
        )
    repair.warn_if_clip_norms_differ(plan)
    return shift


def model_inputs(model: nn.Module, inputs: Any) -> Tensor:
    """Return inputs as a tensor with the dtype and device of the model's parameters."""
    if isinstance(inputs, Tensor):
        rows = inputs.detach()
    else:
        try:
            rows = torch.tensor(np.asarray(inputs))
        except (TypeError, ValueError):
            rows = torch.zeros(())
    if not rows.dim():
        raise OwnerwiseError(
            f"X is a {type(inputs).__name__}; expected the model's inputs as an array or tensor, "
            "[records, ...]"
        )
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is not None:
        dtype = parameter.dtype if rows.is_floating_point() else rows.dtype
        rows = rows.to(parameter.device, dtype)
    if not torch.isfinite(rows).all():
        raise OwnerwiseError("X contains NaN or infinite values; expected finite numbers")
    return rows
