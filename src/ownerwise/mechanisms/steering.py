"""Steering by the share of records that importance sampling accepts.

A record is accepted with probability min(|g|, C) / C, so the accepted share estimates K / (C N), K
being the sum of clipped norms over all N records. Here it comes from noisy counts alone, each of
which the plan has paid for, so everything below is post-processing: it may be shown.

Formal guarantee (docs/proofs/dpis.md): `share` lowers the planned rates by a public factor, and
`clip_scale` scales clip norms and noise alike. Neither makes a step cost more than was planned.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ownerwise.batches import (
    Batch,
    take,
)
from ownerwise.randomness import (
    StepStream,
)

_LEAST_SHARE = 0.01
"""Below, one record would move an update by more than a hundred times what it does at share 1."""
_MOST_LOG_SCALE = 10.0
"""Clip norms stay within what float32 can square, whatever the counts say."""


class AcceptanceSteering:
    """The state of one steered run (`ImportanceSampling.steering`).

    Args:
        expected_batch: of the plan: the candidates of a step at share 1.
        accepted_batch: records to accept in a step, or None to take all candidates.
        acceptance: share of the candidates to accept, or None to keep the clip norms.
        gain: weight of the newest count, between 0 and 1.

    Attributes:
        accepted_share: private estimate of the share of candidates that are accepted, K / (C N).
    """

    def __init__(
        self,
        expected_batch: float,
        accepted_batch: float | None,
        acceptance: float | None,
        gain: float,
    ):
        self._expected_batch = expected_batch
        self._accepted_batch = accepted_batch
        self._acceptance = acceptance
        self._gain = gain
        self._count = 0
        self.accepted_share = 1.0
        self._log_clip_scale = 0.0

    @property
    def share(self) -> float:
        """Share of the drawn records that take part, in (0, 1]."""
        if self._accepted_batch is None:
            return 1.0
        wanted = self._accepted_batch / (self._expected_batch * max(self.accepted_share, 1e-9))
        return min(1.0, max(_LEAST_SHARE, wanted))

    @property
    def clip_scale(self) -> float:
        """What all clip norms, and the noise with them, are multiplied by."""
        return math.exp(self._log_clip_scale)

    def begin(self, batch: Batch, stream: StepStream) -> Batch:
        """Begin a step: return the records that take part, each kept with probability `share`."""
        self._count = 0
        if self.share == 1.0:
            return batch
        kept = np.flatnonzero(stream.uniforms(len(batch)) < self.share)
        return replace(
            batch,
            indices=batch.indices[kept],
            owner_index=batch.owner_index[kept],
            data=take(batch.data, kept.tolist()),
        )

    def see(self, factors: Tensor) -> None:
        """Count the accepted records: those whose factor is not zero."""
        self._count += int(factors.count_nonzero())

    @property
    def count(self) -> int:
        """NOT private: the accepted records of this step."""
        return self._count

    def learn(self, noisy_count: float) -> None:
        """End a step: follow the noisy share of accepted candidates.

        The clip norms follow geometrically, as in Andrew, Thakkar, McMahan, Ramaswamy (2021),
        "Differentially Private Learning with Adaptive Clipping": by exp(gain * excess).
        """
        found = noisy_count / (self._expected_batch * self.share)
        found = min(1.0, max(0.0, found))  # what a share can be: one bad draw moves little
        if self._acceptance is not None:
            moved = self._log_clip_scale + self._gain * (found - self._acceptance)
            self._log_clip_scale = min(_MOST_LOG_SCALE, max(-_MOST_LOG_SCALE, moved))
        self.accepted_share += self._gain * (found - self.accepted_share)

    def state(self) -> dict[str, Any]:
        """Return what the next step needs: made of noisy counts alone."""
        return {
            "accepted_share": self.accepted_share,
            "log_clip_scale": self._log_clip_scale,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a stored state."""
        self.accepted_share = float(state["accepted_share"])
        self._log_clip_scale = float(state["log_clip_scale"])
