"""Check the dtype and shape of the first inputs and targets, and the values of all targets.

No message shows a record's value or the number of records in a batch: both are private.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.batches import described, dtype_name, shape_name
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import State, run_on_dummies
from ownerwise.mechanisms import Loss, ignored_target, plain_loss

_OF_CLASSES = (functional.cross_entropy, functional.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
_OF_PROBABILITIES = (
    functional.binary_cross_entropy_with_logits,
    functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
)
_OF_NUMBERS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
)
_IGNORED_BY_TORCH = -100  # by default
_IGNORED = (
    f"some records have the class {_IGNORED_BY_TORCH}, which torch silently ignores; remove them, "
    "or, if their loss should count as zero, pass loss=functools.partial(cross_entropy, "
    f"ignore_index={_IGNORED_BY_TORCH})"
)
_DTYPE_ERRORS = ("dtype", "datatype", "scalar type", "should be the same")  # in torch's messages
_AS_CLASSES = ".long() (for an array, .astype('int64'))"
_AS_NUMBERS = ".float() (for an array, .astype('float32'))"


def run_on_first(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs for dummy inputs of the same shapes, and restore the model's state.

    If the model fails on the dummies, it is run on the inputs themselves (`run_on_dummies`). If the
    model does not accept the inputs, the error message names the call that converts them.
    """
    try:
        return run_on_dummies(model, inputs, State(model))
    except Exception as error:
        message = f"the model fails on the first records: inputs are {described(inputs)}"
        call = _dtype_fix(model, inputs, str(error))
        ending = f"; {call}" if call else f"; error (not private): {error}"
        raise OwnerwiseError(message + ending) from error


def _dtype_fix(model: nn.Module, inputs: Any, error: str) -> str:
    """If the error is about dtypes, explain how to convert the inputs to the model's dtype."""
    if not isinstance(inputs, Tensor):
        return ""
    if inputs.is_floating_point() and "'indices'" in error:
        return f"an embedding needs int64 inputs: X{_AS_CLASSES}"
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    if not kinds or inputs.dtype == kinds[0] or not any(words in error for words in _DTYPE_ERRORS):
        return ""
    own = dtype_name(kinds[0])
    call = _AS_NUMBERS if kinds[0] == torch.float32 else f".to(torch.{own})"
    return f"a model with {own} parameters needs X{call}"


def target_problems(loss: Loss, outputs: Any, targets: Any) -> list[str]:
    """Return an error message if a torch loss does not accept the targets' dtype or shape."""
    loss, targets = _plain(loss, targets)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim()):
        return []
    kind = _kind(loss)
    if kind in _OF_CLASSES:
        return _class_problems(outputs, targets)
    probabilities = kind in _OF_PROBABILITIES
    if probabilities or (kind in _OF_NUMBERS and targets.dim() != outputs.dim()):
        return _number_problems(outputs, targets, probabilities=probabilities)
    return []


def value_problems(loss: Loss, outputs: Any, targets: Any) -> list[str]:
    """Return an error message if any target is outside the range that a torch loss accepts."""
    cells: int = getattr(loss, "cells", 0)  # of a `PenalisedLoss`
    if cells and getattr(targets, "ndim", 0) == 2 and not _lie_within(targets[:, 1], cells - 1):
        return [
            f"some records have a cell outside the partition's range, 0 to {cells - 1}: "
            "create the targets with partition.targets(labels, columns)"
        ]
    loss, targets = _plain(loss, targets)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor | np.ndarray)):
        return []
    kind = _kind(loss)
    if kind in _OF_PROBABILITIES and not _lie_within(targets, 1):
        return [
            "some targets are outside the range of binary cross-entropy, 0 to 1: encode the two "
            "classes as 0 and 1 (y.unique() shows the values)"
        ]
    if kind not in _OF_CLASSES or _is_float(targets) or outputs.dim() < 2:
        return []
    ignored = ignored_target(loss)
    if ignored is not None and (ignored >= 0 or targets.min() < 0):  # unsigned targets would wrap
        counted = targets != ignored
        chosen = isinstance(loss, functools.partial) and "ignore_index" in loss.keywords
        intended = chosen or ignored != _IGNORED_BY_TORCH or targets.ndim > 1  # padded tokens
        if not intended and not bool(counted.all()):
            return [_IGNORED]
        targets = targets[counted]
    last = outputs.shape[1] - 1
    if _lie_within(targets, last):
        return []
    return [
        f"some targets are not classes from 0 to {last} (one class per model output): number the "
        "classes from 0 (y.unique() shows the values), or give the model more outputs"
    ]


def class_probabilities(loss: Loss, outputs: Any, targets: Any) -> np.ndarray | None:
    """Return the probability of each class, [records, classes]; None unless the model classifies.

    Outputs are logits, unless the loss is one of torch's losses that take probabilities.
    """
    kind = _kind(_plain(loss, targets)[0])
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2) or kind in _OF_NUMBERS:
        return None
    values = outputs.detach().double().cpu()
    if values.dim() == 2 and values.shape[1] > 1:
        return values.softmax(dim=1).numpy()
    of_second = values.flatten()
    if kind not in (functional.binary_cross_entropy, nn.BCELoss):
        of_second = of_second.sigmoid()
    return torch.stack([1 - of_second, of_second], dim=1).numpy()


def _class_problems(outputs: Tensor, targets: Tensor) -> list[str]:
    if outputs.dim() < 2 or outputs.shape[1:] == (1,):
        return [
            f"the outputs are {described(outputs)}, for one class; this loss needs one output per "
            "class: give the model as many outputs as classes, or use "
            "loss=binary_cross_entropy_with_logits with y[:, None].float()"
        ]
    if targets.is_floating_point() and targets.shape == outputs.shape:
        return []  # a probability for each class
    shape = outputs.shape[:1] + outputs.shape[2:]
    call = ""
    if targets.shape == (*shape, 1):
        call = f".squeeze({len(shape)})"
    elif targets.shape == outputs.shape:
        call = ".argmax(1)"
    known = bool(call) or targets.shape == shape
    if targets.dtype not in (torch.int64, torch.uint8) and call != ".argmax(1)":
        call += _AS_CLASSES
    if known and not call:
        return []
    fix = f"pass y{call}" if known else "pass y in this shape"
    return [f"targets are {described(targets)}; expected classes, int64 {shape_name(shape)}: {fix}"]


def _number_problems(outputs: Tensor, targets: Tensor, *, probabilities: bool) -> list[str]:
    call, known = "", targets.shape == outputs.shape
    if outputs.shape == (*targets.shape, 1):
        call, known = "[:, None]" if targets.dim() == 1 else "[..., None]", True
    elif targets.shape == (*outputs.shape, 1):
        call, known = f".squeeze({outputs.dim()})", True
    if probabilities and not targets.is_floating_point():
        call += _AS_NUMBERS
    if known and not call:
        return []
    fix = f"pass y{call}" if known else "give the model as many outputs as a record has targets"
    kind = f"{dtype_name(outputs.dtype)} " if probabilities else ""
    return [
        f"targets are {described(targets)}; expected {kind}{shape_name(outputs.shape)}, like the "
        f"outputs: {fix}"
    ]


def _plain(loss: Loss, targets: Any) -> tuple[Loss, Any]:
    """Return the user's own loss, and the targets that it receives."""
    plain = plain_loss(loss)
    if plain is loss or getattr(targets, "ndim", 0) != 2:
        return loss, targets
    return plain, targets[:, 0]


def _kind(loss: Loss) -> Any:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return type(loss) if isinstance(loss, nn.Module) else loss


def _lie_within(targets: Tensor | np.ndarray, last: int) -> bool:
    size = targets.numel() if isinstance(targets, Tensor) else targets.size
    return not size or bool(targets.min() >= 0 and targets.max() <= last)


def _is_float(array: Tensor | np.ndarray) -> bool:
    return array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"
