"""The cost of rounding in a step: the public slack by which contributions are scaled down.

The plan accounts for sums that one record of owner o changes by at most C_o. In floating point, the
change can be slightly larger, so the step clips to C_o / (1 + slack), which keeps the plan's bound
even with rounding errors (docs/proofs/arithmetic.md). The slack depends on public constants alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ownerwise.mechanisms import Weights
from ownerwise.planning import Plan, largest_total

GRID_TOLERANCE = 1e-4
"""Distance by which the noise grid may move two neighbouring sums apart, in clip norms."""
RELEASE_SLACK = 1e-3
"""Allowance for rounding in a release of sensitivity 1, by the grid and in other records' rows."""
_SUM_ROUNDOFFS = 2.0  # change in a sum's rounding if one record goes, in roundoffs of its size
_ENOUGH = 1e-3  # with a larger slack, summing in classes of clip norms pays off
LARGEST_SLACK = 0.05
"""A step that would have to scale contributions down by more than this refuses its plan."""
_CLASS_RATIO = 4.0  # of the largest to the smallest clip norm in a class


@dataclass(frozen=True)
class Rounding:
    """How a step sums, and by how much it scales contributions down.

    Attributes:
        slack: see the module's docstring.
        classes: class of each owner's clip norm, if each class of similar clip norms is summed
            separately and the classes are added in float64; else None.
    """

    slack: float
    classes: np.ndarray | None = None

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, weights: Weights | None) -> Rounding:
        """Return the rounding for a step under this plan."""
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
    """Return the problem if rounding would scale contributions down too much."""
    slack = Rounding.of(plan, model, weights).slack
    if slack <= LARGEST_SLACK:
        return []
    if weights is not None and weights.score_slack(unit_roundoff(model)) == float("inf"):
        return [
            "rounding can reverse a hard order of the records: give INO a width above 0, or plan "
            "with hardened=True"
        ]
    return [
        f"rounding could add {slack:.0%} to a contribution with the smallest clip norm, because "
        "batches are large or clip norms differ a lot. Plan with hardened=True, with a smaller "
        "batch, or with method='sample'"
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
