"""Check that no record's gradient depends on other records, for `model_separation`.

Hooks and autograd functions can mix records in the backward pass alone, and a record's place in the
batch may decide which parameters it reaches. Each record gets a loss that is linear in its outputs:
a sum of two random functions of them, in secret proportions, multiplied by a secret factor. So some
gradients agree and others oppose each other, on which mixing may depend. Records run together and
in halves, and their gradients are compared by random projections (`gradients.sketches`).

The quick comparison, which nearly all models pass:

- Where the records lie in each tensor is observed on a few of them.
- On all records together, this is confirmed at every use of a parameter, with other factors in each
  pass. What another record adds to a gradient shows there even if all halves contain both.
- The halves take it for granted, but have other factors than the whole. A record's gradient,
  divided by its factor, must be the same. If records lie elsewhere in a half, or are mixed there,
  the gradients are compared with those of records with other factors, so the comparison fails.

It also fails for legitimate hooks that are not linear, such as those that shorten each record's
gradient, and if rounding exceeds the share. It is then repeated in float64. The last resort, the
careful comparison, has the same factors in all runs, and each run observes where its records lie.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import take
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import Tape
from ownerwise.gradients.calls import call_model, tensors_in
from ownerwise.gradients.separation import Trial, close, in_float64, same_outputs
from ownerwise.randomness import StepStream

_FEW = 5  # records on which it is observed where the records lie; few lengths are multiples of 5
_MOST_IN_OWN_PRECISION = 1e-2  # difference for models that cannot run in float64


def check_gradients(
    model: nn.Module, tape: Tape, inputs: Any, count: int, share: float, stream: StepStream
) -> None:
    """Reject a model in which a record's gradient depends on other records.

    Args:
        model: the model; its state is restored.
        tape: the model's tape, which learns where the records lie.
        inputs: the inputs of the records, in secret random order.
        count: the number of records, at least two.
        share: the largest change that is allowed, relative to the gradient.
        stream: secret random numbers.
    """
    drawn = stream.uniforms(3 * count).reshape(3, count)
    proportions = np.stack([np.cos(2 * np.pi * drawn[2]), np.sin(2 * np.pi * drawn[2])], 1)
    factors = np.exp2(8 * drawn[:2] - 4)[:, :, None] * proportions
    own = Tape(model)
    if not _agree(model, own, inputs, factors, share) and not _agree_carefully(
        model, inputs, factors, share
    ):
        raise OwnerwiseError(
            "the gradient of a record changes with the other records in its batch, so its "
            "influence cannot be bounded: make hooks and autograd functions in the model treat "
            "each record separately (no norm, maximum or mean over dimension 0)"
        )
    tape.learn(own)


def _agree(model: nn.Module, tape: Tape, inputs: Any, factors: np.ndarray, share: float) -> bool:
    """Return whether the quick comparison shows that gradients agree."""
    everything = list(range(factors.shape[1]))

    def trial(tape: Tape, rows: list[int], **options: Any) -> Trial:
        def arguments(rows: list[int]) -> tuple[Any, ...]:
            given = factors[0 if rows == everything else 1, rows]
            return tape, take(inputs, rows), given, _lengths(factors[0, rows]) / _lengths(given)

        return Trial(arguments, _sketches, rows, **options)

    if len(everything) > _FEW:
        few = Tape(model)
        trial(few, everything[:_FEW], companies=lambda rows, random: []).run(model)
        tape.learn(few)
    return same_outputs(*trial(tape, everything).run(model).pair, share)


def _agree_carefully(model: nn.Module, inputs: Any, factors: np.ndarray, share: float) -> bool:
    """Return whether gradients agree in float64, by the quick or else the careful comparison.

    A model that cannot run in float64 runs in its own precision, in which the gradients of single
    records and single projections differ more.
    """
    try:
        exact, wide = copy.deepcopy(model).double(), in_float64(inputs)
        if _agree(exact, Tape(exact), wide, factors, share):
            return True
        return same_outputs(*_careful(exact, wide, factors), share)
    except Exception:
        agreeing = [
            close(first[at, :1], second[at, :1], _MOST_IN_OWN_PRECISION)
            for first, second in zip(*_careful(model, inputs, factors), strict=True)
            for at in range(len(first))
        ]
        return 8 * sum(agreeing) >= 7 * len(agreeing)


def _careful(
    model: nn.Module, inputs: Any, factors: np.ndarray
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the same records' sketches in two companies, with the same factors."""

    def arguments(rows: list[int]) -> tuple[Any, ...]:
        return Tape(model), take(inputs, rows), factors[0, rows], np.ones(len(rows))

    return Trial(arguments, _sketches, list(range(factors.shape[1]))).run(model).pair


def _sketches(
    model: nn.Module,
    tape: Tape,
    inputs: Any,
    factors: np.ndarray,
    scales: np.ndarray,
) -> list[Tensor]:
    """Return sketches of the gradients of losses that are linear in the outputs.

    Args:
        model, inputs: the model and the records.
        tape: knows where the records lie, or finds out.
        factors: of two random functions of each record's outputs, `[records, 2]`.
        scales: numbers by which the sketches are multiplied, `[records]`.
    """
    with torch.enable_grad():
        with tape:
            outputs = call_model(model, inputs)
        losses: Tensor | None = None
        numbers = torch.Generator().manual_seed(0)
        for output in tensors_in(outputs):
            if not output.requires_grad or not output.dim() or len(output) != len(factors):
                continue
            flat = output.flatten(1) if output.dim() > 1 else output[:, None]
            functions = torch.randn(flat.shape[1], 2, generator=numbers).to(flat)
            values = ((flat @ functions) * torch.from_numpy(factors).to(flat)).sum(dim=1)
            losses = values if losses is None else losses + values
        if losses is None:
            return []
        return [tape.sketches(losses) * torch.from_numpy(scales)[:, None]]


def _lengths(factors: np.ndarray) -> np.ndarray:
    return np.linalg.norm(factors, axis=1)
