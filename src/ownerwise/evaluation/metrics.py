"""Evaluation: how well a model performs on each group of validation or test records.

No noise is added, so NO guarantee covers the evaluated records: use validation and test data whose
owners have agreed to this, never training records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ownerwise.batches import Collate, arrays_of, is_map_style
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.evaluation.classification import classification
from ownerwise.evaluation.groups import (
    SMALLEST_GROUP,
    group_recalls,
    owner_mean,
    pool_groups,
)
from ownerwise.evaluation.target_checks import (
    class_probabilities,
    run_on_first,
    target_problems,
    value_problems,
)
from ownerwise.gradients import evaluation_mode
from ownerwise.mechanisms import Loss, Release, per_record
from ownerwise.owners import as_array, flat_ids, is_missing
from ownerwise.wording import name_of

_RECORDS_AT_ONCE = 512
FEW_GROUPS = 4
"""The smallest number of groups for which a correlation is reported.

With fewer groups, a correlation would often be large by chance and have no confidence interval.
"""
_MOST_DETAILED = 50  # groups with results of `classification`; a report names no more

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
        owners: each record's owner. Accuracy is then also measured per owner. Without `groups`,
            the owners are the groups. If records have several owners (tuples of ids), it is only
            noted who they are (`owner_ids`).
        collate: combines a Dataset's samples into a batch; by default torch's function.
        predict: function from outputs to classes.
        constraints: constraints to measure as well; each target then contains a class and a cell.
    """

    def __init__(
        self,
        data: Any,
        groups: Any = None,
        *,
        owners: Any = None,
        collate: Collate | None = None,
        predict: Predict = predicted_classes,
        constraints: Release | None = None,
    ):
        self._data = data
        cells, self._owner_counts = (None, None) if owners is None else flat_ids(as_array(owners))
        self.owner_ids, self._owner_problems = _names(cells)
        self.owners = self.owner_ids if self._owner_counts is None else None
        self.groups, self._group_problems = _names(groups)
        self.by_owner = groups is None and self.owners is not None
        if self.by_owner:
            self.groups = self.owners
        self._collate = collate
        self._predict = predict
        self._constraints = constraints

    @property
    def records(self) -> int:
        """Number of records; 0 if the data has no length."""
        rows = self._data[:1] if isinstance(self._data, tuple) else (self._data,)
        return sum(len(array) for array in rows if hasattr(array, "__len__"))

    def pool(self, budgets: Mapping[str, float], unit: str, *, persons: bool) -> dict[str, float]:
        """Replace small groups and single persons by classes of budgets; return the latter.

        See `pool_groups`. If the groups are owners without budgets, classes take their place.
        """
        if self.groups is None or self.problems(""):
            return {}
        known = {name_of(name) for name in np.unique(self.groups).tolist()} & budgets.keys()
        if self.by_owner and not known:
            self.groups, self.by_owner = None, False
            return {}
        self.groups, classes = pool_groups(self.groups, budgets, unit, persons=persons)
        return classes

    def __call__(self, model: nn.Module, loss: Loss, *, details: bool = False) -> dict[str, Any]:
        """Return loss, accuracy, balanced accuracy over classes, and recall and loss by group.

        With `details`, include the results of `classification`, overall and by group.

        Groups of fewer than `SMALLEST_GROUP` records are left out of everything about groups.

        The model runs in evaluation mode; its mode is then restored. A non-finite loss becomes
        None. If constraints are given, their values for the predicted classes are included; a value
        is None if a group is empty.
        """
        unreduced = per_record(loss)
        losses, predicted, actual, cells, probabilities = [], [], [], [], []
        with evaluation_mode(model):
            for inputs, targets in parts_of(self._data, _RECORDS_AT_ONCE, self._collate):
                outputs = model(inputs)
                losses.append(unreduced(outputs, targets).double().cpu().numpy())
                if self._constraints is not None:
                    cells.append(targets[:, 1].cpu().numpy())
                    targets = targets[:, 0]
                predicted.append(self._classes(outputs, targets))
                actual.append(targets.flatten().cpu().numpy())
                if details:
                    probabilities.append(class_probabilities(loss, outputs, targets))
        classes = np.concatenate(predicted)
        targets = np.concatenate(actual)
        metrics = _summary(np.concatenate(losses), classes, targets, self.groups, self.owners)
        if details:
            self._add_details(metrics, classes, targets, probabilities)
        if self._constraints is not None:
            metrics["constraints"] = self._constraints.measure(classes, np.concatenate(cells))
        return metrics

    def _add_details(
        self,
        metrics: dict[str, Any],
        predicted: np.ndarray,
        actual: np.ndarray,
        probabilities: Sequence[np.ndarray | None],
    ) -> None:
        """Add the results of `classification` to the metrics of all records and of groups."""
        known = [part for part in probabilities if part is not None]
        scores = np.concatenate(known) if len(known) == len(probabilities) else None
        if scores is not None and not np.isfinite(scores).all():
            scores = None
        metrics["classification"] = classification(predicted, actual, scores, self.owners)
        names = actual if self.groups is None else self.groups
        found = metrics["groups"] if len(metrics["groups"]) <= _MOST_DETAILED else {}
        for name in np.unique(names):
            if (group := found.get(name_of(name.item()))) is not None:
                at = names == name
                of_scores = None if scores is None else scores[at]
                owners = None if self.owners is None else self.owners[at]
                group["classification"] = classification(
                    predicted[at], actual[at], of_scores, owners, overall=False
                )

    def problems(self, name: str) -> list[str]:
        """Return all problems with the data and the groups."""
        problems = _data_problems(self._data, name)
        owners = self.owners if self._owner_counts is None else self._owner_counts
        given = {"owner": owners, "group": None if self.by_owner else self.groups}
        if not problems:
            problems += [
                f"{name}_{what}s has shape {list(names.shape)} for {self.records} records; "
                f"expected one {what} per record"
                for what, names in given.items()
                if names is not None and names.shape != (self.records,)
            ]
        problems += [f"{name}_owners: {problem}" for problem in self._owner_problems]
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


def _names(given: Any) -> tuple[np.ndarray | None, list[str]]:
    """Return names of one type, and any problems with them."""
    if given is None:
        return None, []
    names = as_array(given)
    if names.dtype.kind != "O":
        return names, []
    cells = names.tolist()
    problems = _name_problems(cells)
    return np.array(list(map(str, cells)) if problems else cells), problems


def _name_problems(cells: Sequence[Any]) -> list[str]:
    """Return an error message if names have missing values or mixed types."""
    if missing := [at for at, cell in enumerate(cells) if is_missing(cell)]:
        return [
            f"no name in {name_some(missing, 'record {}'.format)}; give missing ones a name, such "
            "as 'unknown'"
        ]
    types = sorted({type(cell).__name__ for cell in cells})
    if len(types) > 1:
        return [f"names of type {' and '.join(types)}; expected one type: convert them to str"]
    return []


def _summary(
    losses: np.ndarray,
    predicted: np.ndarray,
    actual: np.ndarray,
    groups: np.ndarray | None,
    owners: np.ndarray | None,
) -> dict[str, Any]:
    by_class = group_recalls(predicted, actual, actual)
    correct = predicted == actual
    names = actual if groups is None else groups
    found = {}
    for name in np.unique(names):
        of_group = names == name
        if of_group.sum() >= SMALLEST_GROUP:
            found[name_of(name.item())] = {
                "loss": _finite(losses[of_group].mean()),
                "recall": float(correct[of_group].mean()),
                "records": int(of_group.sum()),
                **({} if owners is None else owner_mean(correct[of_group], owners[of_group])),
            }
    recalls = {name: group["recall"] for name, group in found.items()}
    worst = min(recalls, key=recalls.__getitem__, default=None)
    return {
        "loss": _finite(losses.mean()),
        "accuracy": by_class.overall,
        **({} if owners is None else owner_mean(correct, owners)),
        "balanced_accuracy": by_class.balanced,
        "worst_group": None if worst is None else {"name": worst, "recall": recalls[worst]},
        "spread": float(np.std(list(recalls.values()))) if recalls else None,
        "groups": found,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
