"""The sum over all records before training, for the plan's column statistics.

Every record's contribution is rounded towards zero to a public grid and added as a whole number of
grid units, which is exact. Adding or removing a record therefore changes the sum by exactly that
record's contribution, in any order of the records and in pieces of any size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import arrays_of
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Standardise, standardising_layers
from ownerwise.owners import of_holders
from ownerwise.planning import Plan
from ownerwise.processes import ALONE, Processes
from ownerwise.randomness import grid_of

_FINENESS = 2.0**-20
"""Largest distance, in L2 norm, that rounding towards zero may take from a contribution."""
_AT_ONCE = 4096


def opening_problems(plan: Plan, model: nn.Module) -> list[str]:
    """Return the reasons why the plan's column statistics do not fit the model."""
    layers = standardising_layers(model)
    if plan.opening_std is None:
        if all(layer.released for layer in layers):
            return []
        return [
            "the model has a layer Standardise, but the plan accounts for no statistics: make the "
            "plan with ow.plan(..., statistics=ow.ColumnStatistics())"
        ]
    if len(layers) != 1:
        return [
            f"the plan accounts for column statistics, and the model has {len(layers)} layers "
            "Standardise; expected one, in front of the network: torch.nn.Sequential("
            "ow.Standardise(data.numbers), network)"
        ]
    if layers[0].released:
        return [
            "the model's layer Standardise already has statistics, from another run: build a new "
            "model"
        ]
    try:
        opening_grid(plan, layers[0])
    except ValueError:
        return [
            f"the noise on the column statistics, {plan.opening_std:g}, is too large for them to "
            "be of use: plan without statistics, or without the strictest owners"
        ]
    return []


def opening_grid(plan: Plan, layer: Standardise) -> float:
    """Return the grid of the sum and of its noise."""
    assert plan.opening_std is not None
    return grid_of(plan.opening_std, 3 * layer.numbers, _FINENESS)


def opening_sum(plan: Plan, layer: Standardise, data: Any, processes: Processes = ALONE) -> Tensor:
    """Return the sum of all contributions, float64 [3 * numbers]; NOT private without noise.

    Several processes each add some of the pieces.

    Adding or removing a record changes it by at most 1 in L2 norm. With unit "owner", this bound
    holds for all records of an owner together.
    """
    units = 1 / opening_grid(plan, layer)

    def own() -> Tensor:
        inputs = _inputs(data, layer)
        scales = torch.from_numpy(_scales(plan))
        total = torch.zeros(3 * layer.numbers, dtype=torch.int64)
        for start in range(processes.rank * _AT_ONCE, len(inputs), processes.count * _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            rows = layer.contributions(inputs[part].cpu()) * (scales[part, None] * units)
            total += rows.trunc().to(torch.int64).sum(dim=0)
        return total

    total = torch.stack(processes.all_of(processes.together(own))).sum(dim=0)
    return total.double() / units


def _scales(plan: Plan) -> np.ndarray:
    """Return the factor of each record's contribution."""
    owners = plan.owners
    assert owners is not None
    index = owners.record_owner_index
    assert index is not None
    scale = 1 - 2.0**-40  # more than the relative rounding error of a contribution's norm
    if plan.unit == "record":
        return np.full(len(index), scale)
    counts = plan.records
    if plan.shared is None:  # as many as there are, if more than declared
        counts = np.maximum(counts, np.bincount(index, minlength=len(counts)))
    # a record with several owners counts as the smallest of their shares
    return scale * of_holders(1 / np.maximum(counts, 1), plan.shared)[index]


def _inputs(data: Any, layer: Standardise) -> Tensor:
    arrays = arrays_of(data)
    found = None if arrays is None else torch.as_tensor(arrays[0])
    if found is None or found.dim() != 2 or found.shape[1] < 2 * layer.numbers:
        shape = type(data).__name__ if found is None else list(found.shape)
        raise OwnerwiseError(
            f"the data is {shape}; column statistics need (X, y) with {layer.numbers} numbers and "
            "as many 0/1 columns for missing values in front of any others: "
            'ow.data.load_table(..., scale="released").train.tensors()'
        )
    return found
