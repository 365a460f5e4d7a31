"""Evaluation: how well a model performs on each group of validation or test records.

No noise is added, so NO guarantee covers the evaluated records: use validation and test data whose
owners have agreed to this, never training records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ownerwise.batches import Collate, arrays_of, is_map_style
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.evaluation.groups import group_recalls
from ownerwise.evaluation.target_checks import run_on_first, target_problems, value_problems
from ownerwise.gradients import evaluation_mode
from ownerwise.mechanisms import Loss, Release, per_record
from ownerwise.owners import as_array, is_missing
from ownerwise.wording import name_of

_RECORDS_AT_ONCE = 512
FEW_GROUPS = 4
"""The smallest number of groups for which a correlation is reported.

With fewer groups, a correlation would often be large by chance and have no confidence interval.
"""

Predict = Callable[[Any], Tensor]
"""predict(outputs) returns the predicted class of each record."""


def predicted_classes(outputs: Tensor) -> Tensor:
    """Return the class with the largest output; with one output, return 1 where it is above 0."""
    if outputs.dim() == 1 or outputs.shape[1:] == (1,):
        return (outputs.flatten() > 0).long()
    return outputs.argmax(dim=1)


class Evaluation:
    """Evaluates a model on one data set, always in the same order and in the same batches.

    Args:
        data: (X, y), or a map-style Dataset that yields (x, y).
        groups: each record's group; by default its class.
        collate: combines a Dataset's samples into a batch; by default torch's function.
        predict: function from outputs to classes.
        constraints: constraints to measure as well; each target then contains a class and a cell.
    """

    def __init__(
        self,
        data: Any,
        groups: Any = None,
        *,
        collate: Collate | None = None,
        predict: Predict = predicted_classes,
        constraints: Release | None = None,
    ):
        self._data = data
        given = None if groups is None else as_array(groups)
        self._group_problems = [] if given is None else _group_problems(given)
        self.groups = given
        if given is not None and given.dtype.kind == "O":
            cells = given.tolist()
            self.groups = np.array(list(map(str, cells)) if self._group_problems else cells)
        self._collate = collate
        self._predict = predict
        self._constraints = constraints

    @property
    def records(self) -> int:
        """Number of records; 0 if the data has no length."""
        rows = self._data[:1] if isinstance(self._data, tuple) else (self._data,)
        return sum(len(array) for array in rows if hasattr(array, "__len__"))

    def __call__(self, model: nn.Module, loss: Loss) -> dict[str, Any]:
        """Return loss, accuracy, balanced accuracy over classes, and recall and loss by group.

        The model runs in evaluation mode; its mode is then restored. A non-finite loss becomes
        None. If constraints are given, their values for the predicted classes are included; a value
        is None if a group is empty.
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
        metrics = _summary(np.concatenate(losses), classes, np.concatenate(actual), self.groups)
        if self._constraints is not None:
            metrics["constraints"] = self._constraints.measure(classes, np.concatenate(cells))
        return metrics

    def problems(self, name: str) -> list[str]:
        """Return all problems with the data and the groups."""
        problems = _data_problems(self._data, name)
        if self.groups is not None and not problems and self.groups.shape != (self.records,):
            problems.append(
                f"{name}_groups has shape {list(self.groups.shape)} for {self.records} records; "
                "expected one group per record"
            )
        return problems + [f"{name}_groups: {problem}" for problem in self._group_problems]

    def trial_problems(self, model: nn.Module, loss: Loss, name: str) -> list[str]:
        """Return the problems that occur when the first records are evaluated."""

        def predict(outputs: Any, targets: Any) -> np.ndarray:
            return self._classes(outputs, targets if self._constraints is None else targets[:, 0])

        return trial_problems(model, loss, self._data, self._collate, name, predict)

    def _classes(self, outputs: Any, targets: Any) -> np.ndarray:
        predicted = self._predict(outputs)
        if predicted.shape != (len(targets),) or targets.numel() != len(targets):
            raise OwnerwiseError(
                f"predictions of shape {list(predicted.shape)} for targets of shape "
                f"{list(targets.shape)}; expected one class per record in both: pass predict=, a "
                "function from outputs to classes, or omit this data"
            )
        return predicted.cpu().numpy()


def parts_of(data: Any, size: int, collate: Collate | None) -> Iterator[tuple[Any, Any]]:
    """Yield (inputs, targets) for `size` records at a time, in the data's order."""
    arrays = arrays_of(data, collate)
    if arrays is not None:
        for start in range(0, len(arrays[0]), size):
            inputs, targets = (_tensor(array[start : start + size]) for array in arrays)
            yield inputs, targets
        return
    generator = torch.Generator()  # does not advance the global generator
    yield from DataLoader(data, size, collate_fn=collate, generator=generator)


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
    """Run the model, the loss and `then` on the first two records, and return any problems.

    Target values are checked for all records if they are in memory.
    """
    arrays = arrays_of(data, collate)
    try:
        with evaluation_mode(model):
            inputs, targets = next(parts_of(data, 2, collate))
            outputs = run_on_first(model, inputs)
            problems = target_problems(loss, outputs, targets)
            problems = problems or value_problems(loss, outputs, arrays[1] if arrays else targets)
            if not problems:
                per_record(loss)(outputs, targets)
                then(outputs, targets)
    except OwnerwiseError as error:
        problems = error.problems
    except Exception as error:
        problems = [f"the model or loss fails on the first records; error (not private): {error}"]
    return [f"{name}: {problem}" for problem in problems]


def _data_problems(data: Any, name: str) -> list[str]:
    if isinstance(data, tuple):
        arrays = [array for array in data if isinstance(array, Tensor | np.ndarray)]
        if not len(arrays) == len(data) == 2 or not all(array.ndim for array in arrays):
            kinds = ", ".join(type(part).__name__ for part in data)
            return [f"{name} is a tuple of {kinds or 'nothing'}; expected two arrays, (X, y)"]
        rows = [len(array) for array in arrays]
        if rows[0] != rows[1] or not rows[0]:
            return [f"{name} has {rows[0]} inputs and {rows[1]} targets; expected equal numbers"]
        return []
    if not is_map_style(data) or isinstance(data, Tensor | np.ndarray):
        return [
            f"{name} is a {type(data).__name__}; expected (X, y), or a map-style Dataset that "
            "yields (x, y)"
        ]
    return [] if len(data) else [f"{name} has no records; omit it, or provide some"]


def _group_problems(groups: np.ndarray) -> list[str]:
    """Return an error message if groups of object dtype have missing values or mixed types."""
    if groups.dtype.kind != "O":
        return []
    cells = groups.tolist()
    if missing := [at for at, cell in enumerate(cells) if is_missing(cell)]:
        return [
            f"no group in {name_some(missing, 'record {}'.format)}; give missing groups a name, "
            "such as 'unknown'"
        ]
    types = sorted({type(cell).__name__ for cell in cells})
    if len(types) > 1:
        return [f"groups of type {' and '.join(types)}; expected one type: convert them to str"]
    return []


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
        "worst_group": {"name": name_of(worst), "recall": by_group.worst},
        "spread": by_group.spread,
        "groups": {
            name_of(name): {
                "loss": _finite(losses[names == name].mean()),
                "recall": recall,
                "records": int((names == name).sum()),
            }
            for name, recall in by_group.recalls.items()
        },
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
