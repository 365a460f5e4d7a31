"""The minority initial drop: a group's loss rises at first while the overall loss falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class InitialDrop:
    """The minority initial drop of one group.

    Attributes:
        first, last: indices of the first and last evaluation in the drop, which is the first series
            of evaluations (with gaps of at most one) in which the group's loss is above its initial
            value while the overall loss is below its initial value.
        depth: largest increase of the group's loss over its initial value during the drop.
    """

    first: int
    last: int
    depth: float


def minority_initial_drop(
    group_losses: np.ndarray, overall_losses: np.ndarray
) -> list[InitialDrop | None]:
    """Return each group's initial drop, computed from its losses; None for a group without one.

    Args:
        group_losses: [evaluations, groups]; the first row was measured before training.
        overall_losses: [evaluations].
    """
    groups = np.asarray(group_losses, dtype=np.float64)
    overall = np.asarray(overall_losses, dtype=np.float64)
    if groups.ndim != 2 or overall.shape != groups.shape[:1]:
        raise ValueError(
            f"group losses of shape {groups.shape} and overall losses of shape {overall.shape}; "
            "expected [evaluations, groups] and [evaluations]"
        )
    dropped = (groups > groups[0]) & (overall < overall[0])[:, None]
    drops: list[InitialDrop | None] = []
    for column in range(groups.shape[1]):
        at = np.flatnonzero(dropped[:, column])
        if not len(at):
            drops.append(None)
            continue
        in_a_row = np.split(at, np.flatnonzero(np.diff(at) > 2) + 1)[0]
        depth = float((groups[in_a_row, column] - groups[0, column]).max())
        drops.append(InitialDrop(int(in_a_row[0]), int(in_a_row[-1]), depth))
    return drops
