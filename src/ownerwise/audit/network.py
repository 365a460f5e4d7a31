"""The network, data, loss and optimizer of an audited run: the user's own, with the canaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ownerwise.audit.canaries import Canaries
from ownerwise.batches import arrays_of
from ownerwise.mechanisms import Contributions, Loss, Release, per_record
from ownerwise.planning import Plan


class CanaryBlock(nn.Embedding):
    """One parameter per canary, whose gradient only that canary's rows have."""

    def __init__(self, count: int):
        super().__init__(count + 1, 1)  # the last one belongs to all other records, and stays put
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return the parameter of each row's canary."""
        return super().forward(input)[:, 0]

    def values(self) -> Tensor:
        """Return the parameters of all canaries, float64."""
        return self.weight.detach()[:-1, 0].double().cpu()


def linear_loss(value: Tensor, level: Tensor, slope: Tensor) -> Tensor:
    """Return losses that equal `level` and have the gradient `slope` with respect to `value`."""
    return level + slope * (value - value.detach())


class AuditedModel(nn.Module):
    """The user's model beside the canaries' parameters; the inputs are (inputs, canary)."""

    def __init__(self, model: nn.Module, block: CanaryBlock):
        super().__init__()
        self.model = model
        self.block = block

    def forward(self, inputs: Any) -> tuple[Any, Tensor]:
        """Return the user's outputs, and the parameter of each row's canary."""
        own, canary = inputs
        return self.model(own), self.block(canary)


class AuditedLoss:
    """The user's loss for records, and a linear loss for canaries."""

    def __init__(self, loss: Loss):
        self._loss = per_record(loss)

    def __call__(self, outputs: Any, targets: Any, *further: Any) -> Tensor:
        """Return one loss per row."""
        own, value = outputs
        target, level, slope = targets
        losses = self._loss(own, target, *further)
        return torch.where(slope > 0, linear_loss(value, level, slope).to(losses), losses)


class AuditedRelease(Release):
    """The user's release, computed from the outputs and targets of the user's model."""

    def __init__(self, release: Release):
        self._release = release
        self.shape = release.shape
        self.release_share = release.release_share
        self.planned_with = release.planned_with

    def contributions(self, outputs: Any, targets: Any) -> Contributions:
        """Return the user's contributions."""
        return self._release.contributions(outputs[0], targets[0])

    def bind(self, plan: Plan) -> AuditedRelease:
        """Return the release in its initial state."""
        return AuditedRelease(self._release.bind(plan))

    def process(self, noised: Tensor) -> Tensor:
        """Return what the loss receives."""
        return self._release.process(noised)

    def output_slack(self, roundoff: float) -> float:
        """Return the slack for rounding."""
        return self._release.output_slack(roundoff)


class CanaryOptimizer(Optimizer):
    """The user's optimizer, and plain SGD with learning rate 1 for the canaries' parameters.

    A step thus changes a canary's parameter by the noised sum in its direction, divided by the
    divisor: an attacker who sees the models sees these sums.
    """

    def __init__(self, block: CanaryBlock, own: Optimizer | None):
        super().__init__(block.parameters(), {"lr": 1.0})
        self._plain = SGD(block.parameters(), lr=1.0)
        self._own = own
        if own is not None:
            self.param_groups = [*own.param_groups, *self.param_groups]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters."""
        if self._own is not None:
            self._own.step()
        self._plain.step()


def canary_columns(canaries: Canaries, records: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the canary, level and slope of each row: of `records` records, then of the canaries.

    Records have canary number `len(canaries)`, level 0 and slope 0.
    """
    of_row = canaries.row_canary
    index = np.concatenate([np.full(records, len(canaries)), of_row])
    level = np.concatenate([np.zeros(records), canaries.level[of_row]])
    slope = np.concatenate([np.zeros(records), canaries.slope[of_row]])
    return torch.from_numpy(index), torch.from_numpy(level).float(), torch.from_numpy(slope).float()


class AuditedData:
    """The user's records, then the canaries' rows: their own records, or else zeros."""

    def __init__(self, data: Any, canaries: Canaries, records: int):
        arrays = arrays_of(data)
        self._arrays = None if arrays is None else tuple(torch.as_tensor(part) for part in arrays)
        self._data = data
        self._records = records
        self._of_canaries = canaries.records
        self._index, self._level, self._slope = canary_columns(canaries, records)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        """Return the inputs and targets of a row."""
        if number < self._records:
            inputs, targets = self._own(number)
        elif self._of_canaries is not None:
            inputs, targets = (part[self._index[number]] for part in self._of_canaries)
        else:
            inputs, targets = (torch.zeros_like(torch.as_tensor(part)) for part in self._own(0))
        own = inputs, self._index[number]
        return own, (targets, self._level[number], self._slope[number])

    def _own(self, number: int) -> tuple[Any, Any]:
        if self._arrays is not None:
            inputs, targets = (part[number] for part in self._arrays)
            return inputs, targets
        return self._data[number]
