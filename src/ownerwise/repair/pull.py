"""The pull adjustment: shift the class outputs by each class's pull, computed from public counts.

With method sample, owner o's records are drawn in proportion to q_o, and wherever clipping is
active, each contributes a gradient of norm C_o. Classes are therefore learned as if their shares
were pull_c = sum_o q_o C_o n_oc. The plan determines the direction of the tilt, but not its size;
`tau` must be chosen to match the size (docs/proofs/calibration.md). `Calibration` measures the tilt
instead.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError, PrivacyWarning, known_names
from ownerwise.mechanisms import Loss, per_record
from ownerwise.planning import Plan

AIMS = ("natural", "balanced")


@dataclass(frozen=True, eq=False)
class PullAdjustment:
    """Shift outputs by tau * log(pull of a class), in the loss or at prediction.

    Formal guarantee: the shift depends only on the plan and on `counts`. It has no privacy cost if
    the counts were public before the records were collected. For an owner with one record, the
    counts reveal the label; never compute the counts from the training labels.

    Attributes:
        tau: strength of the shift: 1 if the sampling rates tilt the model and clipping is not
            active; 0 if nothing is tilted (method scale without clipping).
        counts: public label counts, [owners, classes], in the order of `owners.ids`.
        aim: "natural" makes predictions follow the class shares in `counts`; "balanced" treats all
            classes as equally frequent.
        least_records: the fewest records that an owner must have for the counts to be accepted.
    """

    tau: float = 1.0
    counts: Any = field(default=None, repr=False)
    aim: str = "natural"
    least_records: int = 10

    def __post_init__(self):
        problems = []
        if self.counts is None:
            problems.append("counts are missing: expected public label counts [owners, classes]")
        if not 0 <= self.tau < float("inf"):
            problems.append(f"tau {self.tau}: expected a finite number of at least 0")
        if self.aim not in AIMS:
            problems.append(f"aim is {self.aim!r}; {known_names(self.aim, AIMS)}")
        if self.counts is not None:
            counts = np.asarray(self.counts, dtype=np.float64)
            if counts.ndim != 2 or not (np.isfinite(counts).all() and (counts >= 0).all()):
                problems.append("counts: expected finite numbers >= 0, [owners, classes]")
            elif (small := counts.sum(axis=1) < self.least_records).any():
                problems.append(
                    f"counts: {int(small.sum())} owners have fewer than {self.least_records} "
                    "records, so their counts would reveal labels; merge owners with the same "
                    "budget, or use Calibration(), which needs no counts"
                )
            elif not (counts.sum(axis=0) > 0).all():
                problems.append("counts: a class has no records; expected at least one in each")
            object.__setattr__(self, "counts", counts)
        if problems:
            raise OwnerwiseError([f"PullAdjustment: {problem}" for problem in problems])

    def shift(self, plan: Plan) -> Tensor:
        """Return the numbers to subtract from the outputs at prediction, one per class."""
        if len(self.counts) != len(plan.targets):
            raise OwnerwiseError(
                f"PullAdjustment: counts have {len(self.counts)} rows; expected one for each of "
                f"the {len(plan.targets)} owners, in the order of owners.ids"
            )
        pull = (plan.sampling_rates * plan.clip_norms) @ self.counts
        tilt = np.log(pull / pull.sum())
        if self.aim == "natural":
            shares = self.counts.sum(axis=0)
            tilt -= np.log(shares / shares.sum())
        return torch.tensor(self.tau * tilt)

    def adjusted(self, loss: Loss, plan: Plan) -> Loss:
        """Return a loss that adds the shift to the outputs, so that the model does not learn it."""
        shift = self.shift(plan)
        unreduced = per_record(loss)

        def adjusted_loss(outputs: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
            return unreduced(outputs + shift.to(outputs), targets)

        return adjusted_loss

    def warn_if_counted(self, plan: Plan, labels: np.ndarray) -> None:
        """Warn if the counts are those of the training labels (not private)."""
        owners = plan.owners
        if owners is None or owners.record_owner_index is None:
            return
        counted = np.zeros(self.counts.shape)
        known = (labels >= 0) & (labels < self.counts.shape[1])
        np.add.at(counted, (owners.record_owner_index[known], labels[known].astype(int)), 1)
        if np.array_equal(counted, self.counts):
            warnings.warn(
                "the label counts equal those of the training records. Counts that were taken "
                "from the training labels are NOT private: use counts that were already public, "
                "or Calibration()",
                PrivacyWarning,
                stacklevel=2,
            )
