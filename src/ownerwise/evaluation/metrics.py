"""Evaluation: how well a model serves each group of validation or test records.

No noise is added, so NO guarantee covers the records that are evaluated: give validation and test
data whose owners agreed to that, never training records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation.groups import group_recalls
from ownerwise.evaluation.target_checks import run_on_first, target_problems, value_problems
from ownerwise.mechanisms import Loss, per_record
from ownerwise.mechanisms.constraints import RateConstraints

_RECORDS_AT_ONCE = 512
FEW_GROUPS = 4
"""Over fewer groups no correlation is told: it has no interval, and is nearly always large."""

Collate = Callable[[list[Any]], Any]
"""collate(samples): one batch of a Dataset's samples."""

Predict = Callable[[Any], Tensor]
"""predict(outputs): the predicted class of each record."""


def predicted_classes(outputs: Tensor) -> Tensor:
    """Return the class of the largest output; for a single output, 1 where it is above 0."""
    if outputs.dim() == 1 or outputs.shape[1:] == (1,):
        return (outputs.flatten() > 0).long()
    return outputs.argmax(dim=1)


class Evaluation:
    """Evaluates a model on one set of data, always in the same order and the same parts.

    Args:
        data: (X, y), or a map-style Dataset that yields (x, y).
        groups: group of each record; its class if not given.
        collate: makes a batch of a Dataset's samples; torch's default if not given.
        predict: how outputs become classes.
        constraints: whose values to measure too; targets then hold class and cell.
    """

    def __init__(
        self,
        data: Any,
        groups: Any = None,
        *,
        collate: Collate | None = None,
        predict: Predict = predicted_classes,
        constraints: RateConstraints | None = None,
    ):
        self._data = data
        self.groups = None if groups is None else np.asarray(groups)
        self._collate = collate
        self._predict = predict
        self._constraints = constraints

    @property
    def records(self) -> int:
        """Number of records; 0 for what is no data."""
        rows = self._data[:1] if isinstance(self._data, tuple) else (self._data,)
        return sum(len(array) for array in rows if hasattr(array, "__len__"))

    def __call__(self, model: nn.Module, loss: Loss) -> dict[str, Any]:
        """Return loss, accuracy, balanced accuracy (over classes), and recall and loss by group.

        The model is run in evaluation mode and put back. A loss that is not finite becomes None.
        With constraints, their values on the predicted classes too; None where a group is empty.
        """
        unreduced = per_record(loss)
        losses, predicted, actual, cells = [], [], [], []
        with evaluation_mode(model):
            for inputs, targets in parts_of(self._data, _RECORDS_AT_ONCE, self._collate):
                outputs = model(inputs)
                losses.append(unreduced(outputs, targets).double().cpu().numpy())
                if self._constraints is not None:
                    cells.append(targets[:, 1].cpu().numpy())
                    targets = targets[:, 0]
                predicted.append(self._classes(outputs, targets))
                actual.append(targets.flatten().cpu().numpy())
        classes = np.concatenate(predicted)
        found = _summary(np.concatenate(losses), classes, np.concatenate(actual), self.groups)
        if self._constraints is not None:
            found["constraints"] = self._constraints.measure(classes, np.concatenate(cells))
        return found

    def problems(self, name: str) -> list[str]:
        """Return everything wrong with data and groups, as they are."""
        found = _data_problems(self._data, name)
        if self.groups is not None and not found and self.groups.shape != (self.records,):
            found.append(
                f"{name}_groups has shape {list(self.groups.shape)} for {self.records} records; "
                "expected one group for each record"
            )
        return found

    def trial_problems(self, model: nn.Module, loss: Loss, name: str) -> list[str]:
        """Return what goes wrong when the first records are evaluated."""

        def predict(outputs: Any, targets: Any) -> np.ndarray:
            return self._classes(outputs, targets if self._constraints is None else targets[:, 0])

        return trial_problems(model, loss, self._data, self._collate, name, predict)

    def _classes(self, outputs: Any, targets: Any) -> np.ndarray:
        predicted = self._predict(outputs)
        if predicted.shape != (len(targets),) or targets.numel() != len(targets):
            raise OwnerwiseError(
                f"predictions of shape {list(predicted.shape)} for targets of shape "
                f"{list(targets.shape)}; expected one class per record in both: give predict=, a "
                "function from outputs to classes, or leave this data out"
            )
        return predicted.cpu().numpy()


def parts_of(data: Any, size: int, collate: Collate | None) -> Iterator[tuple[Any, Any]]:
    """Yield (inputs, targets) of `size` records after another, in the data's order."""
    arrays = _arrays(data, collate)
    if arrays is not None:
        for start in range(0, len(arrays[0]), size):
            inputs, targets = (_tensor(array[start : start + size]) for array in arrays)
            yield inputs, targets
        return
    generator = torch.Generator()  # else the global one would advance
    yield from DataLoader(data, size, collate_fn=collate, generator=generator)


def _arrays(data: Any, collate: Collate | None) -> tuple[Any, ...] | None:
    """Return the arrays of data that is in memory, else None."""
    if type(data) is TensorDataset and collate is None:  # a subclass may transform its rows
        data = data.tensors
    return data if isinstance(data, tuple) else None


def _tensor(rows: Tensor | np.ndarray) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.from_numpy(rows.copy())  # may be read-only


def trial_problems(
    model: nn.Module,
    loss: Loss,
    data: Any,
    collate: Collate | None,
    name: str,
    then: Callable[[Any, Any], Any] = lambda outputs, targets: None,
) -> list[str]:
    """Return what goes wrong when model and loss, and then `then`, meet the first two records.

    Classes are looked at in all targets that are in memory.
    """
    arrays = _arrays(data, collate)
    try:
        with evaluation_mode(model):
            inputs, targets = next(parts_of(data, 2, collate))
            outputs = run_on_first(model, inputs)
            found = target_problems(loss, outputs, targets)
            found = found or value_problems(loss, outputs, arrays[1] if arrays else targets)
            if not found:
                per_record(loss)(outputs, targets)
                then(outputs, targets)
    except OwnerwiseError as error:
        found = error.problems
    except Exception as error:
        found = [f"model and loss fail on its first records, the error (not private): {error}"]
    return [f"{name}: {problem}" for problem in found]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, then every part back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _data_problems(data: Any, name: str) -> list[str]:
    if isinstance(data, tuple):
        arrays = [array for array in data if isinstance(array, Tensor | np.ndarray)]
        if not len(arrays) == len(data) == 2 or not all(array.ndim for array in arrays):
            kinds = ", ".join(type(part).__name__ for part in data)
            return [f"{name} is a tuple of {kinds or 'nothing'}; expected two arrays, (X, y)"]
        rows = [len(array) for array in arrays]
        if rows[0] != rows[1] or not rows[0]:
            return [f"{name} has {rows[0]} inputs and {rows[1]} targets; expected one for each"]
        return []
    usable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not usable or isinstance(data, DataLoader | dict) or hasattr(data, "iloc"):
        return [
            f"{name} is a {type(data).__name__}; expected (X, y), or a map-style Dataset that "
            "yields (x, y)"
        ]
    return [] if len(data) else [f"{name} has no records; leave it out, or give some"]


def _summary(
    losses: np.ndarray, predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray | None
) -> dict[str, Any]:
    by_class = group_recalls(predicted, actual, actual)
    names = actual if groups is None else groups
    by_group = by_class if groups is None else group_recalls(predicted, actual, groups)
    worst = min(by_group.recalls, key=by_group.recalls.__getitem__)
    return {
        "loss": _finite(losses.mean()),
        "accuracy": by_class.overall,
        "balanced_accuracy": by_class.balanced,
        "worst_group": {"name": group_name(worst), "recall": by_group.worst},
        "spread": by_group.spread,
        "groups": {
            group_name(name): {
                "loss": _finite(losses[names == name].mean()),
                "recall": recall,
                "records": int((names == name).sum()),
            }
            for name, recall in by_group.recalls.items()
        },
    }


def group_name(group: Any) -> str:
    """Return a group as history and reports name it; classes 0.0 and 1.0 are "0" and "1"."""
    whole = isinstance(group, float) and group.is_integer()
    return str(int(group) if whole else group)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
