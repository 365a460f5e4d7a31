"""Sums over all records after training, for the plan's closing release.

Every record is placed in a secret random row out of a public number of rows (the declared number of
records), as in `secret_rows`, and rows are computed in pieces of a public size. Removing a record
leaves its row empty; everywhere else, every kernel sees the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import ArrayRows, DatasetRows, Unloaded, device_of, moved
from ownerwise.batches.trees import leaves, map_tensors
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import (
    Attributes,
    State,
    call_model,
    changed_by_data,
    evaluation_mode,
    uncompiled,
)
from ownerwise.mechanisms import Closing, unit_rows
from ownerwise.owners import of_holders
from ownerwise.planning import Plan
from ownerwise.processes import ALONE, Processes
from ownerwise.randomness import FINEST_GRID, StepStream, random_order
from ownerwise.step import separation
from ownerwise.step.model_separation import check_outputs
from ownerwise.step.plug_separation import checked_contributions
from ownerwise.step.rounding import GRID_ROOM, GRID_TOLERANCE, LARGEST_SLACK

RECORDS_AT_ONCE = 512
"""Rows in one piece, unless a micro-batch size is given."""
_NO_TABLE = (
    "{} returned contributions that are not a tensor of shape [records, numbers], or whose width "
    "varies; expected one row per record, always of the same width"
)
_MOST_NUMBERS = 2**16  # classes for which the grid is sure to be fine enough


def closing_problems(plan: Plan, at_once: int | None = None) -> list[str]:
    """Return the reasons why the plan's closing release, if any, cannot be made.

    Args:
        plan: the plan.
        at_once: rows in one piece; by default `RECORDS_AT_ONCE`.
    """
    if plan.closing_std is None:
        return []
    problems = []
    index = None if plan.owners is None else plan.owners.record_owner_index
    if index is not None and len(index) > plan.total_records:
        problems.append(
            "the data has more records than were declared for the plan: a release from all records "
            "needs a public number of rows. Make a plan with at least as many declared records"
        )
    least = least_share(plan)
    finest = plan.closing_std * FINEST_GRID * math.sqrt(_MOST_NUMBERS)
    if _slack(plan, at_once or RECORDS_AT_ONCE) > LARGEST_SLACK or GRID_ROOM * least < finest:
        problems.append(
            f"rounding could exceed the contribution of the strictest owners to the release after "
            f"training, who contribute {least:.2g} per record: plan without calibration=, or "
            "without the strictest owners"
        )
    return problems


def least_share(plan: Plan) -> float:
    """Return the smallest positive contribution of a record to a closing sum."""
    lengths = np.concatenate([plan.closing_lengths(0), plan.closing_lengths(1)])
    return float(lengths[lengths > 0].min(initial=1.0))


def _slack(plan: Plan, at_once: int) -> float:
    """Return the slack: a sum of n rows of length at most 1, in pieces, has this relative error."""
    declared = max(plan.total_records, 1)
    pieces = -(-declared // at_once)
    return GRID_TOLERANCE + 2.0**-52 * (at_once + pieces + 8) * declared / least_share(plan)


def closing_sum(
    model: nn.Module,
    plan: Plan,
    closing: Closing,
    rows: ArrayRows | DatasetRows,
    order: StepStream,
    parts: StepStream,
    at_once: int,
    processes: Processes = ALONE,
) -> Tensor:
    """Return the sum of all records' contributions, float64 [numbers]; NOT private without noise.

    Several processes each add some of the pieces, whose rows do not depend on how many there are.

    Adding or removing a record of owner o changes sum number n by at most
    `plan.closing_lengths(n)[o]`, including rounding, where n sums were released before.

    Args:
        model: the trained model, which runs in evaluation mode.
        plan: the plan, with owners.
        closing: computes each record's contribution.
        rows: the records.
        order: secret random numbers used to choose the records' rows.
        parts: secret random numbers used to check that contributions do not depend on other
            records.
        at_once: public number of rows in a piece.
        processes: the processes that compute the sum together.
    """

    def own() -> Tensor | None:
        with processes.apart():
            return _own_sum(model, plan, closing, rows, order, parts, at_once, processes)

    found = [total for total in processes.all_of(processes.together(own)) if total is not None]
    if len({total.shape for total in found}) != 1:
        raise OwnerwiseError(_NO_TABLE.format(type(closing).__name__))
    return torch.stack(found).sum(dim=0)


def _own_sum(
    model: nn.Module,
    plan: Plan,
    closing: Closing,
    rows: ArrayRows | DatasetRows,
    order: StepStream,
    parts: StepStream,
    at_once: int,
    processes: Processes,
) -> Tensor | None:
    """Return the sum of the pieces that this process computes; None if there are none."""
    assert plan.owners is not None
    owner_index = plan.owners.record_owner_index
    assert owner_index is not None
    declared = plan.total_records
    at_once = max(2, at_once)  # a single row cannot be compared with others
    if problems := closing_problems(plan, at_once):
        raise OwnerwiseError(problems)
    record_in = np.full(declared, -1)
    record_in[random_order(order, declared)[: len(owner_index)]] = np.arange(len(owner_index))
    # a record with several owners contributes the least that any of them may
    shares = of_holders(plan.closing_lengths(closing.released), plan.shared)
    if plan.sampling == "owner":  # all records of an owner together contribute one vector
        counts = np.bincount(owner_index, minlength=len(shares))
        shares = shares / np.maximum(counts, 1)
    slack = _slack(plan, at_once)
    room = separation.ROOM * least_share(plan) / max(declared, 1)
    total: Tensor | None = None
    with evaluation_mode(model), _unchanged(model), uncompiled():
        for start in range(processes.rank * at_once, declared, processes.count * at_once):
            records = record_in[start : start + at_once]
            there = records >= 0
            inputs, targets = moved(_placed(rows, records, there, parts), device_of(model))
            if len(records) > 1:
                check_outputs(model, inputs, len(records), room, parts)
            outputs = _outputs(model, inputs)
            found = checked_contributions(
                closing, outputs, targets, len(records), room, parts, absolute=False
            )
            width = None if total is None else len(total)
            if not _is_table(found, len(records), width):
                raise OwnerwiseError(_NO_TABLE.format(type(closing).__name__))
            scales = np.zeros(len(records))
            scales[there] = shares[owner_index[records[there]]] / (1 + slack)
            piece = unit_rows(found, torch.from_numpy(scales)).sum(dim=0).cpu()
            total = piece if total is None else total + piece
    return total


def _is_table(found: Any, records: int, width: int | None) -> TypeGuard[Tensor]:
    """Return whether contributions have one row per record, and `width` columns if it is known."""
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != records:
        return False
    return width is None or found.shape[1] == width


def empty_inputs(rows: ArrayRows | DatasetRows) -> Any:
    """Return inputs with two empty rows, in the shapes and dtypes of the records' inputs."""
    nobody = np.full(2, -1)
    return _placed(rows, nobody, nobody >= 0)[0]


def _outputs(model: nn.Module, inputs: Any) -> Any:
    """Return the model's outputs; what it keeps in attributes must not reach the next records."""
    attributes = Attributes(model)
    outputs = call_model(model, inputs)
    attributes.drop_data()  # refuses tensors that were changed in place
    attributes.restore()
    return outputs


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Reject and undo changes to the model's parameters and buffers: they would retain data."""
    state = State(model)
    try:
        yield
    finally:
        changed = sorted(state.changed())
        state.restore()
    if changed:
        raise changed_by_data(changed[0])


def _placed(
    rows: ArrayRows | DatasetRows,
    records: np.ndarray,
    there: np.ndarray,
    parts: StepStream | None = None,
) -> tuple[Any, Any]:
    """Return inputs and targets with one row per entry of `records`; negative entries give zeros.

    With `parts`, some records are also collated separately, which must not change their rows.
    """
    wanted = records[there]
    part = None
    if isinstance(rows, ArrayRows):
        data = rows[wanted]
    else:
        none = np.zeros(0, dtype=np.int64)
        chosen = none
        if parts is not None and rows.foreign and len(wanted) > 1:
            chosen = np.sort(random_order(parts, len(wanted))[: max(1, len(wanted) // 64)])
        data, part = rows[wanted, chosen]
    if part is not None:
        raise OwnerwiseError(
            "collate returns different rows for a record depending on the other records, so its "
            "influence on the release after training cannot be bounded: pad to a fixed length, "
            "and do not use statistics over the batch"
        )
    if isinstance(data, Unloaded):
        raise OwnerwiseError(
            f"a record could not be loaded ({data.error}) for the release after training"
        )
    if not (isinstance(data, tuple) and len(data) == 2):
        raise OwnerwiseError("the data does not yield pairs; expected (inputs, targets)")
    index = torch.from_numpy(np.flatnonzero(there))

    def placed(tensor: Tensor) -> Tensor:
        empty = tensor.new_zeros((len(records), *tensor.shape[1:]))
        return empty.index_copy_(0, index.to(tensor.device), tensor)

    if not all(isinstance(leaf, Tensor) for leaf in leaves(data)):
        raise OwnerwiseError("the data yields something other than tensors")
    return tuple(map_tensors(placed, data))  # type: ignore[return-value]
