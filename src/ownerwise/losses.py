"""Losses record by record: any torch loss, asked not to reduce."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError

Loss = Callable[..., Tensor]


def per_record(loss: Loss) -> Loss:
    """Return `loss` as a function to one number per record.

    A loss with a `reduction` argument or attribute (all of torch's) is called with "none"; any
    other must itself return one entry per record. What is left per record (tokens, pixels, output
    columns) is averaged within the record, so the gradient of a record depends on it alone. Further
    arguments (a noised release) are handed through.
    """
    unreduced = _without_reduction(loss)

    def losses(outputs: Any, targets: Any, *further: Any) -> Tensor:
        values = unreduced(outputs, targets, *further)
        records = len(targets) if hasattr(targets, "__len__") else None
        if values.dim() == 0 or (records is not None and len(values) != records):
            raise OwnerwiseError(
                f"the loss returned shape {list(values.shape)} for {records} records; expected "
                "one entry (or row) per record: return values before any mean or sum over the batch"
            )
        return values.flatten(1).mean(dim=1) if values.dim() > 1 else values

    return losses


def _without_reduction(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module):
        if hasattr(loss, "reduction"):
            loss = copy.copy(loss)
            vars(loss)["reduction"] = "none"
        return loss
    try:
        accepts_reduction = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        accepts_reduction = False
    if not accepts_reduction:
        return loss
    return functools.partial(loss, reduction="none")
