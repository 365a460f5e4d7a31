"""What rounding costs a step: the public slack by which contributions are shortened.

The plan accounts for sums that one record of owner o changes by at most C_o. Floating point changes
them by a little more, so the step clips to C_o / (1 + slack) and keeps the plan's promise including
its own roundings (docs/proofs/arithmetic.md). The slack depends on public constants alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ownerwise.mechanisms import Weights
from ownerwise.planning import Plan, largest_total

GRID_TOLERANCE = 1e-4
"""How far the grid of the noise may move two neighbouring sums apart, in units of a clip norm."""
RELEASE_SLACK = 1e-3
"""What rounding may add to a release of sensitivity 1: its grid, and the rows of the others."""
_SUM_ROUNDOFFS = 2.0  # roundoffs of a sum's size by which removing a record moves its roundings
_ENOUGH = 1e-3  # a larger slack is worth summing in classes of clip norms
LARGEST_SLACK = 0.05
"""A step that would have to shorten contributions by more than this refuses its plan."""
_CLASS_RATIO = 4.0  # of the largest to the smallest clip norm of a class


@dataclass(frozen=True)
class Rounding:
    """How a step sums, and by how much it shortens contributions.

    Attributes:
        slack: see the module's text.
        classes: class of each owner's clip norm, if contributions of similar length are summed
            apart and the classes added in float64; else None.
    """

    slack: float
    classes: np.ndarray | None = None

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, weights: Weights | None) -> Rounding:
        """Return the rounding of a step of this plan."""
        roundoff = unit_roundoff(model)
        everyone = np.zeros(len(plan.clip_norms), dtype=np.int64)
        slack, classes = _sum_slack(plan, everyone, roundoff), None
        if slack > _ENOUGH and plan.hardened_rows is not None:  # else all sums change their rows
            ratio = np.log(plan.clip_norms / plan.clip_norms.min()) / np.log(_CLASS_RATIO)
            classes = ratio.astype(np.int64)
            slack = _sum_slack(plan, classes, roundoff)
        order = 0.0
        if weights is not None and plan.hardened_rows is None:
            total = _largest_clip_total(plan, everyone >= 0)
            order = weights.score_slack(roundoff) * total / float(plan.clip_norms.min())
        several = classes is not None and classes.max() > 0
        return cls(GRID_TOLERANCE + slack + order, classes if several else None)


def rounding_problems(plan: Plan, model: nn.Module, weights: Weights | None) -> list[str]:
    """Return why rounding would take too much of the contributions, if it would."""
    slack = Rounding.of(plan, model, weights).slack
    if slack <= LARGEST_SLACK:
        return []
    if weights is not None and weights.score_slack(unit_roundoff(model)) == float("inf"):
        return [
            "a hard order of the records can be turned around by rounding: give INO a width above "
            "0, or plan with hardened=True"
        ]
    return [
        f"rounding could add {slack:.0%} to a contribution of the smallest clip norm: a batch is "
        "large, or clip norms differ a lot. Plan with hardened=True, with a smaller batch, or with "
        "method='sample'"
    ]


def unit_roundoff(model: nn.Module) -> float:
    """Return the unit roundoff of the least precise trainable parameter's sum."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    sums = {torch.promote_types(dtype, torch.float32) for dtype in dtypes} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in sums) / 2


def _sum_slack(plan: Plan, classes: np.ndarray, roundoff: float) -> float:
    return max(
        _SUM_ROUNDOFFS
        * roundoff
        * _largest_clip_total(plan, classes == number)
        / float(plan.clip_norms[classes == number].min())
        for number in np.unique(classes)
    )


def _largest_clip_total(plan: Plan, which: np.ndarray) -> float:
    return largest_total(
        plan.sampling_rates[which],
        plan.records[which].astype(np.float64),
        plan.clip_norms[which],
        plan.overflow_probability,
    )
