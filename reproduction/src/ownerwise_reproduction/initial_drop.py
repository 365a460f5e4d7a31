"""The minority initial drop: a group whose loss rises at first while the overall loss falls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class InitialDrop:
    """The minority initial drop of one group.

    Attributes:
        first, last: the first evaluations in a row (one in between may be better) at which the
            group's loss lies above its start while the overall loss lies below its own, as indices.
        depth: by how much the group's loss rises above its start there, at most.
    """

    first: int
    last: int
    depth: float


def minority_initial_drop(
    group_losses: np.ndarray, overall_losses: np.ndarray
) -> list[InitialDrop | None]:
    """Return the drop of every group from losses over training; None for a group without.

    Args:
        group_losses: [evaluations, groups], the first row before training.
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
