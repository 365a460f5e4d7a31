"""The pull adjustment: shift the class outputs by each class's pull, computed from public counts.

With method sample, owner o's records are drawn in proportion to q_o, and wherever clipping is
active, each contributes a gradient of norm C_o. Classes are therefore learned as if their shares
were pull_c = sum_o q_o C_o n_oc. The plan determines the direction of the tilt, but not its size;
`tau` must be chosen to match the size (docs/proofs/calibration.md). `Calibration` measures the tilt
instead.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError, PrivacyWarning, known_names
from ownerwise.mechanisms import Plug
from ownerwise.owners import frozen
from ownerwise.planning import Plan

AIMS = ("natural", "balanced")
PER = ("owner", "budget")
_FEWEST = 2  # records: the counts of a single record are its label


@dataclass(frozen=True, eq=False)
class PullAdjustment(Plug):
    """Shift outputs by tau * log(pull of a class), in the loss or at prediction.

    In the loss (`Trainer(..., repair=)`, `PrivateStep(..., repair=)`), the shift is added to the
    outputs before the loss, so the model does not learn the tilt, and its plain outputs are already
    corrected. At prediction (`run.predict(X, repair=)`), the shift is subtracted from the outputs.

    Formal guarantee: the shift depends only on the plan and on `counts`, and is the same for every
    record. It has no privacy cost if the counts were public before the records were collected. For
    an owner with one record, the counts reveal the label; never compute the counts from the
    training labels. The report and the card state that label counts were published.

    Attributes:
        tau: strength of the shift: 1 if the sampling rates tilt the model and clipping is not
            active; 0 if nothing is tilted (method scale without clipping).
        counts: public label counts, [owners, classes], in the order of `owners.ids`.
        aim: "natural" makes predictions follow the class shares in `counts`; "balanced" treats all
            classes as equally frequent.
        per: "owner", or "budget" if `counts` has one row for all owners with the same epsilon, in
            ascending order of epsilon.
        least_records: the smallest number of records that a row of `counts` may have.
    """

    tau: float = 1.0
    counts: Any = field(default=None, repr=False)
    aim: str = "natural"
    per: str = "owner"
    least_records: int = 10

    def __post_init__(self):
        problems = []
        if not _is_number(self.tau) or not 0 <= self.tau < float("inf"):
            problems.append(f"tau {self.tau!r}: expected a finite number of at least 0")
        for name, known in (("aim", AIMS), ("per", PER)):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                problems.append(f"{name} is {given!r}; {known_names(given, known)}")
        least = self.least_records
        if not _is_number(least) or not _FEWEST <= least == int(least):
            problems.append(
                f"least_records {least!r}: expected a whole number of at least {_FEWEST}, because "
                "the counts of a single record are its label"
            )
        counts = _read(self.counts)
        if counts is None:
            given = "missing" if self.counts is None else "not a table of numbers"
            problems.append(
                f"counts are {given}: expected finite numbers of at least 0, the public label "
                "counts [owners, classes]"
            )
        elif not problems:
            problems += self._count_problems(counts)
        if problems:
            raise OwnerwiseError([f"PullAdjustment: {problem}" for problem in problems])
        object.__setattr__(self, "counts", counts)

    def _count_problems(self, counts: np.ndarray) -> Iterator[str]:
        small = int((counts.sum(axis=1) < self.least_records).sum())
        if small:
            merge = 'publish counts per budget (per="budget"), or ' if self.per == "owner" else ""
            yield (
                f"counts: {small} {self.per}s have fewer than {self.least_records} records, so "
                f"their counts would reveal labels; {merge}use Calibration(), which needs no counts"
            )
        if counts.shape[1] < 2:
            yield f"counts have {counts.shape[1]} columns; expected one per class, at least 2"
        elif not (counts.sum(axis=0) > 0).all():
            yield "counts: a class has no records; expected at least one in each"

    @property
    def stateful(self) -> bool:
        """True, so that checkpoints store the settings: a run resumes with its own repair only."""
        return True

    def settings(self) -> dict[str, Any]:
        """Return the class name and the options, as JSON types, with a hash of the counts."""
        content = f"{self.counts.shape}".encode() + self.counts.astype("<f8").tobytes()
        return {**super().settings(), "counts": hashlib.sha256(content).hexdigest()}

    def record(self, plan: Plan) -> dict[str, Any]:
        """Return the settings and the shift under a plan (None if it does not fit), as JSON."""
        fits = not list(self.problems(plan))
        return {**self.settings(), "shift": self.shift(plan).tolist() if fits else None}

    def problems(
        self, plan: Plan, weights: str | None = None, release: str | None = None
    ) -> Iterator[str]:
        """Yield the reasons why the shift does not fit a run under the plan.

        Args:
            plan: the plan.
            weights, release: names of the run's weights and release; None if it has none.
        """
        rows = len(_row_of(plan, self.per)[0])
        if len(self.counts) != rows:
            order = "owners, in the order of owners.ids"
            if self.per == "budget":
                order = "epsilons, in ascending order"
            yield (
                f"PullAdjustment: counts have {len(self.counts)} rows; expected one for each of "
                f"the {rows} {order}"
            )
        for name in filter(None, (weights, release)):
            yield (
                f"PullAdjustment with {name}: how hard a class pulls then depends on the records, "
                "not only on the plan, so the shift would be wrong. Leave one of them out, or use "
                "Calibration(), which measures the tilt"
            )
        if plan.shared is not None:
            yield (
                "PullAdjustment with records of several owners: such a record pulls less than the "
                "other records of its owners, and the counts do not say how many there are of each "
                "class. Use Calibration(), which measures the tilt"
            )
        if self.aim == "balanced" and plan.closing_std is not None:
            yield (
                'PullAdjustment with aim "balanced": the plan pays for a calibration, which makes '
                'predictions follow the natural class shares; use aim "natural", or plan without '
                "calibration="
            )

    def shift(self, plan: Plan) -> Tensor:
        """Return the numbers to subtract from the outputs at prediction, one per class."""
        if problems := list(self.problems(plan)):
            raise OwnerwiseError(problems)
        pull = _row_of(plan, self.per)[0] @ self.counts
        tilt = np.log(pull / pull.sum())
        if self.aim == "natural":
            shares = self.counts.sum(axis=0)
            tilt -= np.log(shares / shares.sum())
        return torch.tensor(self.tau * tilt)

    def warn_if_clip_norms_differ(self, plan: Plan) -> None:
        """Warn if clip norms differ: they tilt a model only as far as gradients are clipped."""
        if self.tau > 0 and np.ptp(plan.clip_norms) > 0:
            warnings.warn(
                f"PullAdjustment(tau={self.tau:g}) assumes that clip norms, which differ in this "
                f"plan (method {plan.method!r}), tilt the model. If few gradients are clipped, "
                "they do not, and the shift introduces the opposite tilt: use Calibration(), which "
                "measures it, or method='sample'",
                stacklevel=4,
            )

    def warn_if_counted(self, plan: Plan, labels: Any) -> None:
        """Warn if the counts are those of the training labels (the warning is not private).

        `labels` is an array or tensor, [records] or [records, 1].
        """
        owners = plan.owners
        if owners is None or owners.record_owner_index is None or owners.shared is not None:
            return
        row_of_owner = _row_of(plan, self.per)[1]
        labels = np.asarray(labels)
        labels = (labels[:, 0] if labels.ndim == 2 else labels).round()
        counted = np.zeros(self.counts.shape)
        known = (labels >= 0) & (labels < self.counts.shape[1])
        rows = row_of_owner[owners.record_owner_index[known]]
        np.add.at(counted, (rows, labels[known].astype(int)), 1)
        if np.array_equal(counted, self.counts):
            warnings.warn(
                "the label counts equal those of the training records (this message is itself not "
                "private: no guarantee covers it). Counts that were taken from the training labels "
                "are NOT private: use counts that were already public, or Calibration()",
                PrivacyWarning,
                stacklevel=2,
            )


def _row_of(plan: Plan, per: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the pull of a record in each row of counts, and the row of each owner.

    Owners with the same epsilon have the same rate and clip norm unless their deltas differ; then
    their mean counts, weighted by the numbers of elements that are drawn.
    """
    pulls = plan.sampling_rates * plan.clip_norms
    if per == "owner":
        return pulls, np.arange(len(pulls))
    _, row = np.unique(plan.targets, return_inverse=True)
    drawn = plan.elements
    total, count = (np.bincount(row, weights=w) for w in (pulls * drawn, drawn))
    return total / count, row


def _read(counts: Any) -> np.ndarray | None:
    """Return counts as an immutable float64 table; None if they are none."""
    try:
        table = np.array(counts, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    fits = table.ndim == 2 and np.isfinite(table).all() and (table >= 0).all()
    return frozen(table) if fits else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
