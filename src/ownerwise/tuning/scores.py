"""How a run of a search is judged: on public data, or by a noised count that every run pays for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.accounting import gaussian_mu
from ownerwise.batches import NamedArrays
from ownerwise.errors import OwnerwiseError
from ownerwise.evaluation import Predict, predicted_classes
from ownerwise.owners import Owners
from ownerwise.randomness import Noise, SecretStream, grid_of

_AT_ONCE = 4096
_SHARE = 0.02
_LARGEST_STD = 1e6  # counts are then multiples of the grid


@dataclass(frozen=True)
class PublicScore:
    """A score on public records, which costs nothing. Larger is better.

    Guarantee: the score is a function of the run's released model and of public data alone. The
    guarantee does not cover these records.

    Args:
        data: (X, y), public records.
        measure: function of (model, X, y) that returns a number; by default, the share of correct
            predictions.
        predict: function from the model's outputs to classes.
    """

    data: Any
    measure: Callable[[nn.Module, Any, Any], float] | None = None
    predict: Predict = predicted_classes

    def __call__(self, model: nn.Module) -> float:
        """Return the score of a trained model."""
        inputs, targets = _pair(self.data)
        if self.measure is not None:
            with torch.no_grad():
                return float(self.measure(model, inputs, targets))
        return float(_correct(model, inputs, targets, self.predict).mean())

    def problems_with(self, model: nn.Module) -> list[str]:
        """Return the reasons why a model cannot be judged."""
        try:
            self(model)
        except Exception as error:  # of the user's own functions
            return [f"the score cannot be computed: {type(error).__name__}: {error}"]
        return []


class PaidScore:
    """A noised count of correct predictions on private validation records. Larger is better.

    Guarantee: every run of the search releases one sum. With unit "record", each validation record
    adds 0 or 1. With unit "owner", each owner adds the mean over their validation records, rounded
    down to the grid of the noise. So one record, or one owner, changes the sum by at most 1, and
    Gaussian noise of std s makes it a Gaussian mechanism with multiplier s, without sampling. The
    search charges every owner in the plan for it in addition to the steps, in each run, although a
    record is either trained on or validated on. Validation records whose owners are not in the plan
    are charged for the score alone; their owners' budgets are checked too. Public: s, and how many
    records of an owner may be validation records (`owners.records`).

    Each record is evaluated alone, so that no record changes the rounding of another's outputs. A
    record adds 0 if its evaluation fails: that must not stop the others from being counted.

    Validation records must be selected by a rule on each record, or each owner, alone, such as
    `ownerwise.data.hold_out`; never by position. They must not be trained on, nor evaluated without
    noise elsewhere.

    Args:
        data: (X, y), private records.
        owners: the owners of these records, with their budgets, in the order of the records.
        std: std of the noise; by default, so much that the strictest budget could pay for
            1 / share such sums.
        share: see `std`.
        predict: function from the model's outputs to classes.
    """

    def __init__(
        self,
        data: Any,
        owners: Owners,
        *,
        std: float | None = None,
        share: float = _SHARE,
        predict: Predict = predicted_classes,
    ):
        self.data, self.owners, self.predict = data, owners, predict
        if owners.record_owner_index is None or owners.shared is not None:
            raise OwnerwiseError(
                "the owners of the score need records with one owner each; expected "
                "Owners(record_owner, budgets) with one id per validation record"
            )
        if not 0 < share < 1 or not (std is None or 0 < std < _LARGEST_STD):
            raise OwnerwiseError(
                f"share {share!r} with std {std!r}: expected a share between 0 and 1, and a "
                f"positive std below {_LARGEST_STD:g} or None"
            )
        strictest = min(
            gaussian_mu(float(epsilon), float(delta))
            for epsilon, delta in set(
                zip(owners.epsilon.tolist(), owners.delta.tolist(), strict=True)
            )
        )
        self.std = float(std or min(1 / (math.sqrt(share) * strictest), _LARGEST_STD))
        self.records = int(owners.records.max())
        """The largest number of validation records that an owner declares."""

    def problems(self) -> list[str]:
        """Return the problems with the records."""
        index = self.owners.record_owner_index
        assert index is not None
        inputs, targets = _pair(self.data)
        counts = np.bincount(index, minlength=len(self.owners))
        problems = []
        if not len(inputs) == len(targets) == len(index):
            problems.append(
                f"the score has {len(inputs)} inputs, {len(targets)} targets and {len(index)} "
                "owner ids; expected one of each per record"
            )
        if (counts > self.owners.records).any():
            problems.append(
                "an owner has more validation records than declared: expected at most that many, "
                "because the cost for all of them together follows from the declared number"
            )
        if len(targets) and np.asarray(targets).size != len(targets):
            problems.append("the score has several targets per record; expected one class for each")
        return problems

    def problems_with(self, model: nn.Module) -> list[str]:
        """Return the reasons why a model cannot be judged, from an attempt at the first record."""
        inputs, targets = _pair(self.data)
        tried, before = copy.deepcopy(model), model.state_dict()
        try:
            _correct(tried, inputs[:1], targets[:1], self.predict)
        except Exception as error:  # of the user's own functions
            return [f"the score cannot be computed: {type(error).__name__}: {error}"]
        return [
            f"{name} of the model changes when it is evaluated, so one record could change the "
            "predictions for others; expected a model whose eval mode changes nothing"
            for name, value in tried.state_dict().items()
            if isinstance(value, Tensor) and not torch.equal(value, before[name])
        ]

    def bind(self, stream: SecretStream, unit: str) -> Callable[[nn.Module], float]:
        """Return the function that releases a model's score; each call is paid for by one run."""
        noise, grid = Noise(stream, purpose="score"), grid_of(self.std)
        index = self.owners.record_owner_index
        assert index is not None
        inputs, targets = _pair(self.data)
        released = 0

        def score(model: nn.Module) -> float:
            nonlocal released
            tried = copy.deepcopy(model)  # the released model must not have seen these records
            correct = _correct_alone(tried, inputs, targets, self.predict)
            total = contribution_sum(correct, index, len(self.owners), unit, grid)
            (value,) = noise.gaussian(
                released, [torch.tensor([total], dtype=torch.float64)], self.std, grid
            )
            released += 1
            return float(value)

        return score


def contribution_sum(
    correct: np.ndarray, index: np.ndarray, owners: int, unit: str, grid: float
) -> float:
    """Return the sum that is released, before noise: a multiple of the grid, exact in float64."""
    if unit == "record":
        return float(np.count_nonzero(correct))
    counts = np.bincount(index, minlength=owners)
    means = np.bincount(index, weights=correct, minlength=owners) / np.maximum(counts, 1)
    return float((np.floor(np.minimum(means, 1.0) / grid) * grid).sum())


def _pair(data: Any) -> tuple[Any, Any]:
    inputs, targets = NamedArrays.of(data)[:2]
    return inputs, targets


def _correct_alone(model: nn.Module, inputs: Any, targets: Any, predict: Predict) -> np.ndarray:
    """Return whether each prediction is correct; one that fails is not, and affects no other."""
    result = np.zeros(len(targets))
    for at in range(len(targets)):
        with suppress(Exception):
            one = slice(at, at + 1)
            (result[at],) = _correct(model, inputs[one], targets[one], predict)
    return result


def _correct(model: nn.Module, inputs: Any, targets: Any, predict: Predict) -> np.ndarray:
    """Return whether each prediction is correct, in eval mode; the mode is restored."""
    was_training = model.training
    model.eval()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    parts = []
    try:
        with torch.no_grad():
            for start in range(0, len(targets), _AT_ONCE):
                some = torch.as_tensor(inputs[start : start + _AT_ONCE]).to(device)
                parts.append(predict(model(some)).cpu().reshape(-1))
    finally:
        model.train(was_training)
    wanted = torch.as_tensor(np.asarray(targets)).reshape(-1)
    found = torch.cat(parts) if parts else torch.zeros(0)
    if found.shape != wanted.shape:
        raise OwnerwiseError(
            f"{found.numel()} predictions for {wanted.numel()} records; expected one class for each"
        )
    return (found == wanted).numpy().astype(np.float64)
