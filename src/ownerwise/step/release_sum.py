"""What the records of a batch add to the plan's extra release, and the release with its noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ownerwise.batches import moved
from ownerwise.mechanisms import Contributions, Randomness, Release, proven, sum_of_unit_rows
from ownerwise.planning import Plan
from ownerwise.randomness import StepStream
from ownerwise.step import separation
from ownerwise.step.micro_batches import MicroBatch
from ownerwise.step.plug_separation import checked_contributions
from ownerwise.step.secret_rows import Rows


class ReleaseSum:
    """Sums the contributions to a release, such as the histograms of rate constraints.

    Args:
        release: the release, bound to the plan.
        plan: the plan.
        slack: the fraction that rounding may add to a contribution (`Rounding.release_slack`).
    """

    def __init__(self, release: Release, plan: Plan, slack: float):
        self._release = release
        self._plan = plan
        self._slack = slack

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the release."""
        return tuple(self._release.shape)

    def of(
        self, micro_batches: Sequence[MicroBatch], rows: Rows | None, parts: StepStream
    ) -> Tensor:
        """Return what this process's records add to the release; NOT private without noise.

        Args:
            micro_batches: the micro-batches, with their outputs.
            rows: their rows; None if this process has no records.
            parts: secret random numbers used to check user-defined releases.
        """
        release, plan = self._release, self._plan
        absolute = plan.release_noise == "laplace"
        shares = plan.release_shares
        share = separation.ROOM * (1.0 if shares is None else float(shares.min()))
        share /= 1 if rows is None else rows.total

        def contributions(micro: MicroBatch) -> Contributions:
            if proven(release):
                return release.contributions(micro.outputs, micro.targets)
            return checked_contributions(
                release, micro.outputs, micro.targets, len(micro), share, parts, absolute=absolute
            )

        found = [contributions(micro) for micro in micro_batches]
        places = [micro.rows for micro in micro_batches]
        scales = None if rows is None else self._scales(rows)
        return sum_of_unit_rows(found, places, release.shape, scales, absolute=absolute)

    def noised(self, total: Tensor, randomness: Randomness, device: torch.device | None) -> Tensor:
        """Make the release from the sum of all processes; return what the loss receives of it."""
        with torch.no_grad():
            noised = randomness.release(total / (1 + self._slack))
            return moved(self._release.process(noised), device)

    def _scales(self, rows: Rows) -> np.ndarray | None:
        """Return the factor for each row's contribution; None if all factors are 1."""
        scales, segments = self._plan.holders.release_shares, rows.segments
        if segments is not None:  # all rows of an owner together contribute one vector
            shares = segments.shares.numpy()
            if scales is None:
                return shares
            return shares * scales[rows.owner_index][segments.index.numpy()]
        if scales is None:
            return rows.occupied
        return rows.spread(scales[rows.owner_index], empty=0.0)
