"""Per-record losses: any torch loss, without its reduction."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import row_counts
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.gradients import (
    State,
    changed_by_data,
    differing,
)

Loss = Callable[..., Tensor]

_COMPARED = 16  # records that `check_separation` compares


def per_record(loss: Loss) -> Loss:
    """Return `loss` as a function that returns one number per record.

    A loss with a `reduction` argument or attribute (all of torch's) is called with "none"; any
    other must return one entry per record itself. Several values per record (tokens, pixels, output
    columns) are averaged within the record, so a record's gradient depends on that record only.
    Ignored targets (`ignore_index`) do not count: otherwise a record's loss would depend on its
    padding, and so on the longest record of the batch. Class weights multiply the loss and are not
    normalised, because their sum over the batch depends on the other records. Extra arguments (a
    noised release) are passed on.
    """
    unreduced = _without_reduction(loss)
    ignored = ignored_target(loss)

    def losses(outputs: Any, targets: Any, *further: Any) -> Tensor:
        values = unreduced(outputs, targets, *further)
        records = row_counts(targets)
        if values.dim() == 0 or {len(values)} != records:
            returned = "more or fewer rows than records" if values.dim() else "a single number"
            raise OwnerwiseError(
                f"the loss returned {returned}; expected one entry (or row) per record: do not "
                "average or sum over the batch"
            )
        if values.dim() == 1:
            return values
        flat = values.flatten(1)
        if ignored is None or not isinstance(targets, Tensor) or targets.shape != values.shape:
            return flat.mean(dim=1)
        return flat.sum(dim=1) / (targets != ignored).flatten(1).sum(dim=1).clamp(min=1)

    return losses


def _without_reduction(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module):
        if hasattr(loss, "reduction"):
            loss = copy.copy(loss)
            vars(loss)["reduction"] = "none"
        return loss
    if "reduction" not in _parameters(loss):
        return loss
    return functools.partial(loss, reduction="none")


def ignored_target(loss: Loss) -> int | None:
    """Return the target value that a loss ignores (`ignore_index`), if any."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "ignore_index", None)
    argument = _parameters(loss).get("ignore_index")
    return argument.default if argument and isinstance(argument.default, int) else None


def _parameters(loss: Loss) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):  # implemented in C
        return {}


def check_separation(losses: Callable[[list[int]], Tensor], records: int, model: nn.Module) -> None:
    """Refuse a model or loss in which a record's loss depends on the other records.

    Typical causes are statistics over the batch, or outputs [B, 1] compared with targets [B]. A
    record must have the same loss in a batch of other records as in a batch of its own copies, and
    both batches must leave the model in the same state.

    Args:
        losses: returns the losses of the given rows of a batch.
        records: number of rows in the batch, 2 or more.
        model: the model behind the losses; its state is restored.
    """
    count = min(records, _COMPARED)
    middle = count // 2
    state = State(model)

    def evaluate(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            with torch.no_grad():
                return losses(rows), state.changed()
        finally:
            state.restore()

    among_others, state_after_others = evaluate(list(range(count)))
    among_copies, state_after_copies = evaluate([middle] * count)
    for name in differing(state_after_others, state_after_copies):
        raise changed_by_data(name)
    pair = among_others[middle], among_copies[middle]
    if not torch.isclose(*pair, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise OwnerwiseError(
            "the loss of a record changes with the other records in its batch, so its influence "
            "cannot be bounded: make model and loss treat each record separately (no statistics "
            "over dimension 0, randomness only from torch), and give outputs and targets the same "
            "shape"
        )


def loss_problems(loss: Loss, model: nn.Module) -> Iterator[str]:
    """Yield a problem if the loss has trainable parameters, which the private step would miss."""
    if not isinstance(loss, nn.Module):
        loss = getattr(loss, "plain", loss)  # the loss inside a `PenalisedLoss`
    if isinstance(loss, nn.Module):
        known = {id(parameter) for parameter in model.parameters()}
        own = [n for n, p in loss.named_parameters() if p.requires_grad and id(p) not in known]
        if own:
            yield (
                f"the loss has trainable parameters ({name_some(own)}), which would be neither "
                "clipped nor noised; move them into the model, or freeze them"
            )
