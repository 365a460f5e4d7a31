"""Check whether a record's result depends on other records, for losses, plugs and models alike.

Clipping bounds a record's own gradient. It bounds the record's influence only if the contributions
of other records do not depend on that record. A loss divided by the largest loss in its batch, for
instance, lets one record change the sum by hundreds of times the clip norm.

The method: a function is called on the *whole* micro-batch and on a secret random *part* of it. The
results for the records in the part must *agree*, up to a *share* of what a record may contribute.

- `loss_separation`: the loss, at every step; values and gradients with respect to the outputs
- `plug_separation`: user-defined clipping rules and releases, at every step
- `model_separation`: the model, at steps 0, 1, 2, 4, 8, ..., and `collate`, at every step

Torch's own losses that by definition treat records separately are exempt (`losses.never_mixes`),
as are the plugs in this package, for which this is proven.

Formal guarantee: let B be the number of records in the batch and C the smallest clip norm. A
loss passes if no record in the part has a contribution that changes by more than 0.01 C / B,
measured in the gradient with respect to the outputs. Mixing below this threshold changes the sum by
at most about 0.01 C. Mixing above this threshold is detected with probability at least 1/4 per step
if one record depends on another (the part must contain the first but not the second), and with
probability 1/2 if all records depend on a single one. If a record has many outputs, fewer records
are compared.

Rounding: 0.01 / B is below the precision of float32 for large batches, and always below that of
bfloat16. If the results differ, both are therefore recomputed and compared in float64, so
legitimate functions pass at any batch size. The results in the original precision must also
agree, to within 256 times the machine epsilon. This rules out functions such as (x + k) - k, where
k is the largest number in the batch: the result equals x in float64, but not in lower precision. If
a function cannot run in float64, its results may differ by up to 16 times the machine epsilon of
their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.gradients.calls import map_tensors
from ownerwise.randomness import StepStream

ROOM = 0.01
"""Maximum permitted change in the sum from mixing records, in units of the smallest clip norm."""

_MOST_NUMBERS = 1 << 14  # approximate number of outputs compared in one micro-batch
_FEWEST_RECORDS = 2
ROUNDINGS = 16  # for functions that cannot run in float64
MOST_ROUNDINGS = 256  # for functions that agree in float64
active = True  # not an option: switched off only to measure its cost

TREAT_APART = (
    "so its influence cannot be bounded: compute each record's {} from that record alone (no mean, "
    "sum, count or maximum over the batch, no random numbers, and nothing kept between calls)"
)


def choose(rows: int, numbers: int, stream: StepStream) -> Tensor:
    """Choose a secret random subset of the rows, about half at most; return the sorted indices.

    Args:
        rows: number of records in the micro-batch; if there is only one, it is always chosen.
        numbers: how many numbers the function takes or returns for the whole micro-batch.
        stream: this step's secret random numbers for this purpose.
    """
    if rows == 1:
        return torch.zeros(1, dtype=torch.long)
    most = max(_FEWEST_RECORDS, _MOST_NUMBERS * rows // max(numbers, 1))
    if rows >= 8 and most >= rows // 2:
        (chosen,) = stream.coins(rows).nonzero()
        if 1 < len(chosen) < rows:
            return torch.from_numpy(chosen)
    count = min(most, (rows + 1) // 2)
    if count > rows // 8:
        return torch.from_numpy(np.sort(np.argsort(stream.words(rows))[:count]))
    return torch.from_numpy(np.unique(stream.integers(rows, count)))


def others(rows: int, part: Tensor) -> Tensor:
    """Return the sorted indices of the rows outside a part."""
    return torch.from_numpy(np.setdiff1d(np.arange(rows), part.numpy()))


def rows_at(values: Any, index: Tensor, rows: int) -> Any:
    """Return copies of the rows at `index` of every tensor that has one row per record."""

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != rows:
            return tensor.detach()
        return tensor.detach().index_select(0, index.to(tensor.device))

    return take(values) if isinstance(values, Tensor) else map_tensors(take, values)


def in_float64(values: Any) -> Any:
    """Return values with every floating-point tensor in float64."""
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, values)


def rows_agree(first: Tensor, second: Tensor, room: float | Tensor) -> bool:
    """Return True if no row differs by more than `room`. Two non-finite rows count as equal."""
    if first.shape != second.shape:
        return False
    first, second = first.double().flatten(1), second.double().flatten(1)
    distances = torch.linalg.vector_norm(first - second, dim=1)
    bad = ~torch.isfinite(first).all(dim=1) & ~torch.isfinite(second).all(dim=1)
    return bool(((distances <= room) | bad).all())


def agree_in_float64(
    agree: Callable[[Any, Any, float], bool],
    pair: tuple[Any, Any],
    exact: Callable[[], tuple[Any, Any]],
    share: float,
    *,
    rounded: float,
    fallback: float,
) -> bool:
    """Return whether results that differ by more than `share` agree once rounding is allowed for.

    Args:
        agree: whether two results agree up to a share.
        pair: the results, in the function's own precision.
        exact: recomputes both in float64, or raises any exception.
        share: the largest difference in float64.
        rounded: the largest difference in the function's own precision.
        fallback: the largest difference if the function cannot run in float64.
    """
    same = agree(*pair, max(share, rounded))
    try:
        pair = exact()
    except Exception:
        share = max(share, fallback)
    return same and agree(*pair, share)
