"""Rounding in a step: the public slack by which contributions are scaled down to allow for it.

The plan assumes that one record of owner o changes each sum by at most C_o. In floating-point
arithmetic, the change can be slightly larger, so the step clips to C_o / (1 + slack), which
preserves the plan's bound despite rounding errors (docs/proofs/arithmetic.md). The slack depends
only on public constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ownerwise.batches import surplus_problems
from ownerwise.errors import OwnerwiseError
from ownerwise.gradients import BLOCK, autocasts
from ownerwise.mechanisms import SMALLEST_NORM, Release, Steering, Weights
from ownerwise.planning import Plan, hardened_or, largest_total

GRID_TOLERANCE = 1e-4
"""The part of the slack that covers rounding to the noise grid."""
NORM_ERROR = 1e-5
"""Largest relative error of a computed gradient norm."""
CHARGED_NORM_ERROR = 5e-4
"""By how much a norm is rounded up before it is charged by individual accounting."""
_NORM_ROUNDOFFS = 100.0  # error of a norm in models of low precision, in their roundoffs
RELEASE_SLACK = 1e-3
"""Allowance for rounding, both to the grid and in other rows, in a release with sensitivity 1."""
# The change in a sum's rounding when a record is removed, in relative roundoffs: in blocks, and
# without them. The largest change found was 1.2 in blocks of `BLOCK`, and 3.9 without.
_SUM_ROUNDOFFS, _PLAIN_ROUNDOFFS = 2.0, 8.0
_NEGLIGIBLE = 1e-3  # records are summed without blocks, which is faster, up to this slack
_MOST_OF_EXCHANGE = 5e-3  # processes send float32 sums, which are half as large, up to this slack
# The same bound if every rounding within the blocks may change: for each of the two sums,
# one roundoff per record of a block, and one each for the factor, the weight and their products.
_BLOCK_ROUNDOFFS = 2.0 * (BLOCK + 4)
LARGEST_SLACK = 0.2
"""The largest permitted slack; a step rejects a plan that would need more."""
GRID_ROOM = GRID_TOLERANCE / (1 + LARGEST_SLACK)
"""Largest increase in the distance between two neighbouring sums due to rounding to the noise grid,
in units of the clip norm. Contributions are divided by 1 + slack, rounding to the grid is not."""
_CLASS_RATIO = 4.0  # ratio of the largest to the smallest clip norm in a class


@dataclass(frozen=True)
class Rounding:
    """How a step sums contributions and by how much it scales them down.

    Attributes:
        slack: see the module's docstring.
        classes: class of each owner's clip norm, or None. Similar clip norms are in the same class.
            Each class is summed separately, and the sums of the classes are added in float64.
        in_blocks: whether records are summed in blocks, whose sums are added in float64.
        release_slack: slack for a record's contribution to a release.
        exchange: the dtype in which several processes send and add their sums.
    """

    slack: float
    classes: np.ndarray | None = None
    in_blocks: bool = False
    release_slack: float = RELEASE_SLACK
    exchange: torch.dtype = torch.float64

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: nn.Module,
        weights: Weights | None,
        release: Release | Steering | None = None,
        processes: int = 1,
    ) -> Rounding:
        """Return the summation method and the slacks for a step under this plan."""
        rounding = cls._of_gradients(plan, model, weights)
        if processes > 1:
            slack, exchange = _of_exchange(plan, model, processes)
            rounding = replace(rounding, slack=rounding.slack + slack, exchange=exchange)
        if plan.hardened_rows is not None or release is None:
            return rounding
        if isinstance(release, Steering):
            error = max(NORM_ERROR, _NORM_ROUNDOFFS * loss_roundoff(model))
            per_record = release.slack_per_record(error)
        else:
            per_record = release.output_slack(loss_roundoff(model))
        return replace(rounding, release_slack=RELEASE_SLACK + per_record * _most_records(plan))

    @classmethod
    def _of_gradients(cls, plan: Plan, model: nn.Module, weights: Weights | None) -> Rounding:
        roundoff = unit_roundoff(model)
        clip_norms = plan.holders.clip_norms
        classes = np.zeros(len(clip_norms), dtype=np.int64)
        if weights is not None and weights.score_slack(roundoff) > 0:
            # the weights of all records change, and with them every rounding in the sum
            total = _clip_totals(plan, classes)[0]
            slack = (_SUM_ROUNDOFFS + _BLOCK_ROUNDOFFS) * roundoff * total
            if plan.hardened_rows is None:
                slack += weights.score_slack(loss_roundoff(model)) * total
            return cls(GRID_TOLERANCE + NORM_ERROR + slack, in_blocks=True)
        if plan.hardened_rows is not None:  # otherwise, removing a record shifts all rows
            ratio = np.log(clip_norms / clip_norms.min()) / np.log(_CLASS_RATIO)
            classes = ratio.astype(np.int64)
        total = max(_clip_totals(plan, classes))
        slack = _PLAIN_ROUNDOFFS * roundoff * total
        in_blocks = plan.hardened_rows is not None or slack > _NEGLIGIBLE
        if in_blocks:
            slack = _SUM_ROUNDOFFS * roundoff * total
        if plan.hardened_rows is not None:  # only the record's own block is rounded differently
            slack += _BLOCK_ROUNDOFFS * roundoff * BLOCK * _largest_ratio(plan, classes)
        return cls(
            GRID_TOLERANCE + NORM_ERROR + slack,
            classes if classes.max() > 0 else None,
            in_blocks=in_blocks,
        )


def rounding_problems(
    plan: Plan,
    model: nn.Module,
    weights: Weights | None,
    release: Release | Steering | None = None,
    processes: int = 1,
) -> list[str]:
    """Return all problems that rounding causes under this plan."""
    rounding = Rounding.of(plan, model, weights, release, processes)
    problems = surplus_problems(plan)
    if rounding.release_slack == math.inf:
        problems.append(
            "constraints with hard=True count predicted classes, which rounding can change: "
            + hardened_or(plan.unit, "remove hard=True")
        )
    elif isinstance(release, Steering):  # the slack only adds to the noise of the number
        pass
    elif rounding.release_slack > LARGEST_SLACK:
        problems.append(
            f"rounding could add {rounding.release_slack:.0%} to a record's contribution to the "
            "histogram: " + hardened_or(plan.unit, "use a lower temperature or smaller batches")
        )
    if plan.clip_norms.min() < SMALLEST_NORM:
        problems.append(
            f"the plan has clip norms down to {plan.clip_norms.min():.2g}; expected at least "
            f"{SMALLEST_NORM:g}, because their squares underflow in float32: plan with a larger "
            "clip_norm"
        )
    slack = rounding.slack
    if slack <= LARGEST_SLACK:
        return problems
    ordinary = plan.hardened_rows is None
    if weights is not None and ordinary and weights.score_slack(1.0) == float("inf"):
        return [
            *problems,
            "rounding can swap records in a hard ranking: "
            + hardened_or(plan.unit, "pass INO a width above 0"),
        ]
    return [
        *problems,
        f"rounding could add {slack:.0%} to the contribution of a record with the smallest "
        "clip norm, because batches are large or clip norms differ widely: "
        + hardened_or(plan.unit, "plan with a smaller batch or with method='sample', or train a ")
        + "float64 model (model.double())",
    ]


def _of_exchange(plan: Plan, model: nn.Module, processes: int) -> tuple[float, torch.dtype]:
    """Return the slack and the dtype in which several processes add their sums.

    Each process rounds its sum once, and adding `processes` sums in any order takes one rounding
    less than there are of them. Every rounding is at most one roundoff of the total clip norm, in
    either of the two sums. Double precision is sent only where single would cost too much.
    """
    total = _clip_totals(plan, np.zeros(len(plan.holders.clip_norms), dtype=np.int64))[0]
    roundoff = unit_roundoff(model)
    slack = 2.0 * processes * roundoff * total
    if roundoff < _roundoff(torch.float32):
        return slack, torch.float64
    if slack <= _MOST_OF_EXCHANGE:
        return slack, torch.float32
    return 2.0 * processes * _roundoff(torch.float64) * total, torch.float64


def unit_roundoff(model: nn.Module) -> float:
    """Return the unit roundoff of the gradient sum for the least precise trainable parameter."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    sums = {torch.promote_types(dtype, torch.float32) for dtype in dtypes} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in sums) / 2


def refuse_imprecise(plan: Plan, outputs: Iterable[Tensor], roundoff: float) -> None:
    """Reject outputs that are less precise than `roundoff`.

    The slack for ordering records assumes the roundoff that the parameters had when the step was
    built. Autocast is the usual cause of less precise outputs; under autocast, even float32 outputs
    have lost precision.
    """
    kinds = {(output.dtype, output.device) for output in outputs if output.is_floating_point()}
    dtypes = {dtype for dtype, _ in kinds}
    for device in {device for _, device in kinds}:
        if autocasts(device):
            dtypes.add(torch.get_autocast_dtype(device.type))
    if any(_roundoff(dtype) > roundoff for dtype in dtypes):
        raise OwnerwiseError(
            "the model computes in half precision (autocast, or a cast in its forward pass), but "
            "the allowance for ordering records by their losses assumes the precision of the "
            "parameters: " + hardened_or(plan.unit, "compute the losses at full precision")
        )


@functools.cache
def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def loss_roundoff(model: nn.Module) -> float:
    """Return the unit roundoff of the least precise floating-point parameter."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2


def _largest_ratio(plan: Plan, classes: np.ndarray) -> float:
    """Return the largest ratio of two clip norms in the same clip-norm class."""
    members = (plan.holders.clip_norms[classes == number] for number in np.unique(classes))
    return max(float(norms.max() / norms.min()) for norms in members)


def _most_records(plan: Plan) -> float:
    """Return an upper bound on the number of records in a batch."""
    of = plan.holders
    records = of.elements.astype(np.float64)
    return largest_total(
        of.sampling_rates, records, np.ones(len(records)), plan.overflow_probability
    )


def _clip_totals(plan: Plan, classes: np.ndarray) -> list[float]:
    """Bound the total clip norm of each class, in units of the class's smallest clip norm."""
    of = plan.holders
    members = [np.flatnonzero(classes == number) for number in np.unique(classes)]
    return [
        largest_total(
            of.sampling_rates[which],
            of.elements[which].astype(np.float64),
            of.clip_norms[which],
            plan.overflow_probability / len(members),
        )
        / float(of.clip_norms[which].min())
        for which in members
    ]
