"""Losses record by record: any torch loss, asked not to reduce."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ownerwise.batches import (
    row_counts,
)
from ownerwise.errors import OwnerwiseError, name_some
from ownerwise.gradients import (
    State,
    changed_by_data,
    differing,
)

Loss = Callable[..., Tensor]

_COMPARED = 16  # records among which one is looked at, to see whether the others change its loss


def per_record(loss: Loss) -> Loss:
    """Return `loss` as a function to one number per record.

    A loss with a `reduction` argument or attribute (all of torch's) is called with "none"; any
    other must itself return one entry per record. What is left per record (tokens, pixels, output
    columns) is averaged within the record, so the gradient of a record depends on it alone; targets
    that the loss ignores (`ignore_index`) do not count, else a record would depend on how far the
    longest of its batch made it be padded. Class weights multiply: they are not divided out, as
    their sum over the batch depends on the other records. Further arguments (a noised release) are
    handed through.
    """
    unreduced = _without_reduction(loss)
    ignored = ignored_target(loss)

    def losses(outputs: Any, targets: Any, *further: Any) -> Tensor:
        values = unreduced(outputs, targets, *further)
        records = row_counts(targets)
        if values.dim() == 0 or {len(values)} != records:
            given = "other rows than there are records" if values.dim() else "a single number"
            raise OwnerwiseError(
                f"the loss returned {given}; expected one entry (or row) per record: return values "
                "before any mean or sum over the batch"
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
    """Return the target that a loss does not count (`ignore_index`), if it has one."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "ignore_index", None)
    argument = _parameters(loss).get("ignore_index")
    return argument.default if argument and isinstance(argument.default, int) else None


def _parameters(loss: Loss) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):  # built into C
        return {}


def check_separation(losses: Callable[[list[int]], Tensor], records: int, model: nn.Module) -> None:
    """Refuse a model or loss in which a record's loss depends on the other records.

    So do statistics over the batch, or outputs [B, 1] that meet targets [B]. A record in the middle
    of some others must have the loss that it has in the middle of copies of itself, and the model
    must keep the same of both batches, whatever way it takes.

    Args:
        losses: the losses of the given rows of a batch.
        records: number of rows that the batch has, 2 or more.
        model: that the losses are of; its state is restored.
    """
    count = min(records, _COMPARED)
    middle = count // 2
    state = State(model)

    def look(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            with torch.no_grad():
                return losses(rows), state.changed()
        finally:
            state.restore()

    among_others, kept_of_others = look(list(range(count)))
    among_copies, kept_of_copies = look([middle] * count)
    for name in differing(kept_of_others, kept_of_copies):
        raise changed_by_data(name)
    pair = among_others[middle], among_copies[middle]
    if not torch.isclose(*pair, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise OwnerwiseError(
            "the loss of a record changes with the other records of its batch, so its influence "
            "cannot be bounded: let model and loss work on each record alone (no statistics over "
            "dimension 0, randomness only from torch), and give outputs and targets the same shape"
        )


def loss_problems(loss: Loss, model: nn.Module) -> Iterator[str]:
    """Yield what a loss must not have: parameters that train outside of the private step."""
    if not isinstance(loss, nn.Module):
        loss = getattr(loss, "plain", loss)  # of a loss with constraints
    if isinstance(loss, nn.Module):
        known = {id(parameter) for parameter in model.parameters()}
        own = [n for n, p in loss.named_parameters() if p.requires_grad and id(p) not in known]
        if own:
            yield (
                f"the loss has parameters of its own ({name_some(own)}), which would be neither "
                "clipped nor noised; make them the model's, or freeze them"
            )
