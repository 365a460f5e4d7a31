"""What the step's checks of losses, plugs and models share (method: `gradients.separation`).

A function is called on the *whole* micro-batch and on a secret random *part* of it. The results for
the records in the part must agree, up to a *share* of what a record may contribute.

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
bfloat16, so results that differ are compared in float64. In their own precision they may differ by
up to 256 times the machine epsilon; if a function cannot run in float64, by up to 16 times.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
