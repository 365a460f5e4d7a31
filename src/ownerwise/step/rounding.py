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
_WEIGHTED_ROUNDOFFS = 0.4  # the same with weights, which all change a little, times the records
LARGEST_SLACK = 0.2
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
        classes = np.zeros(len(plan.clip_norms), dtype=np.int64)
        if weights is not None and weights.score_slack(roundoff) > 0:
            # the weights of all records change, and with them the roundings of the whole sum
            total = _clip_totals(plan, classes)[0]
            records = largest_total(
                plan.sampling_rates,
                plan.records.astype(np.float64),
                np.ones(len(plan.records)),
                plan.overflow_probability,
            )
            slack = (_SUM_ROUNDOFFS + _WEIGHTED_ROUNDOFFS * records) * roundoff * total
            if plan.hardened_rows is None:
                slack += weights.score_slack(_loss_roundoff(model)) * total
            return cls(GRID_TOLERANCE + slack)
        if plan.hardened_rows is not None:  # else a record's removal moves the rows of every class
            ratio = np.log(plan.clip_norms / plan.clip_norms.min()) / np.log(_CLASS_RATIO)
            classes = ratio.astype(np.int64)
        slack = _SUM_ROUNDOFFS * roundoff * max(_clip_totals(plan, classes))
        return cls(GRID_TOLERANCE + slack, classes if classes.max() > 0 else None)


def rounding_problems(plan: Plan, model: nn.Module, weights: Weights | None) -> list[str]:
    """Return the problem if rounding would scale contributions down too much."""
    problems = _count_problems(plan, weights)
    slack = Rounding.of(plan, model, weights).slack
    if slack <= LARGEST_SLACK:
        return problems
    ordinary = plan.hardened_rows is None
    if weights is not None and ordinary and weights.score_slack(1.0) == float("inf"):
        return [
            *problems,
            "rounding can reverse a hard order of the records: give INO a width above 0, or plan "
            "with hardened=True",
        ]
    return [
        *problems,
        f"rounding could add {slack:.0%} to a contribution with the smallest clip norm, because "
        "batches are large or clip norms differ a lot. Plan with hardened=True, with a smaller "
        "batch, or with method='sample'; or train a float64 model (model.double())",
    ]


def _count_problems(plan: Plan, weights: Weights | None) -> list[str]:
    """Return the problem if the bounds on a batch rely on counts that the data exceed."""
    owners = plan.owners
    if owners is None or owners.record_owner_index is None:
        return []
    if plan.hardened_rows is None and weights is None:
        return []
    counts = np.bincount(owners.record_owner_index, minlength=len(plan.records))
    if (counts <= plan.records).all():
        return []
    return [
        "some owners have more records than they declare, but hardened plans and weights bound a "
        "batch by the declared numbers: declare at least as many (Owners(..., records=))"
    ]


def unit_roundoff(model: nn.Module) -> float:
    """Return the unit roundoff of the least precise trainable parameter's sum."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    sums = {torch.promote_types(dtype, torch.float32) for dtype in dtypes} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in sums) / 2


def _loss_roundoff(model: nn.Module) -> float:
    """Return the unit roundoff of the least precise floating-point parameter."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2


def _clip_totals(plan: Plan, classes: np.ndarray) -> list[float]:
    """Return the largest total clip norm in each class, in units of its smallest clip norm."""
    members = [np.flatnonzero(classes == number) for number in np.unique(classes)]
    return [
        largest_total(
            plan.sampling_rates[which],
            plan.records[which].astype(np.float64),
            plan.clip_norms[which],
            plan.overflow_probability / len(members),
        )
        / float(plan.clip_norms[which].min())
        for which in members
    ]
