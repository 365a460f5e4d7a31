"""Adapt sampling rates and clip norms to the fraction of records accepted by importance sampling.

A record is accepted with probability min(|g|, C) / C, so the accepted fraction estimates K / (C N),
where K is the sum of clipped norms over all N records. The fraction is computed only from noisy
counts that the plan accounts for, so everything computed from it is post-processing and may be
published.

Formal guarantee (docs/proofs/dpis.md): `keep_probability` lowers the planned sampling rates by a
public factor, and `clip_scale` scales clip norms and noise together. Neither change
raises the privacy cost of a step above the planned cost.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ownerwise.batches import Batch
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.plugs import Steering
from ownerwise.randomness import StepStream

_LEAST_KEEP_PROBABILITY = 0.01
"""Limits one record's influence on an update to 100 times its influence without selection."""
_MOST_LOG_SCALE = 10.0
"""Keeps squared clip norms within the range of float32, regardless of the counts."""


class AcceptanceSteering(Steering):
    """The adaptation state of one run (see `ImportanceSampling.steering`).

    Args:
        expected_batch: expected batch size of the plan, which is the expected number of candidates
            per step if all drawn records are kept.
        accepted_batch: target number of accepted records per step, or None to keep all candidates.
        acceptance: target fraction of accepted candidates, or None to leave the clip norms
            unchanged.
        gain: weight of the newest count, between 0 and 1.

    Attributes:
        accepted_share: differentially private estimate of the accepted fraction of candidates, K /
            (C N).
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
    def keep_probability(self) -> float:
        """Probability that a drawn record is used, in (0, 1]."""
        if self._accepted_batch is None:
            return 1.0
        wanted = self._accepted_batch / (self._expected_batch * max(self.accepted_share, 1e-9))
        return min(1.0, max(_LEAST_KEEP_PROBABILITY, wanted))

    @property
    def clip_scale(self) -> float:
        """Factor applied to all clip norms and to the noise."""
        return math.exp(self._log_clip_scale)

    def select(self, batch: Batch, stream: StepStream | None) -> Batch:
        """Start a step: keep each record, or drawn owner, with probability `keep_probability`."""
        self._count = 0
        if self.keep_probability == 1.0:
            return batch
        assert stream is not None  # the rule is randomised
        return batch.kept(stream.uniforms(batch.count_elements()) < self.keep_probability)

    def observe(self, norms: Tensor, clip_norms: Tensor, factors: Tensor) -> None:
        """Count the accepted records, which are those with a nonzero factor."""
        self._count += int(factors.count_nonzero())

    @property
    def total(self) -> float:
        """NOT private: the number of records accepted in this step."""
        return self._count

    def update(self, noisy_total: float) -> None:
        """Finish a step: adapt to the noisy fraction of accepted candidates.

        The clip norms change geometrically, by a factor of exp(gain * excess), as in Andrew,
        Thakkar, McMahan, Ramaswamy (2021), "Differentially Private Learning with Adaptive
        Clipping".
        """
        accepted = noisy_total / (self._expected_batch * self.keep_probability)
        accepted = min(1.0, max(0.0, accepted))  # a fraction; limits the effect of one bad draw
        if self._acceptance is not None:
            moved = self._log_clip_scale + self._gain * (accepted - self._acceptance)
            self._log_clip_scale = min(_MOST_LOG_SCALE, max(-_MOST_LOG_SCALE, moved))
        self.accepted_share += self._gain * (accepted - self.accepted_share)

    def state(self) -> dict[str, Any]:
        """Return the state for the next step, computed from noisy counts only."""
        return {
            "accepted_share": self.accepted_share,
            "log_clip_scale": self._log_clip_scale,
        }

    def settings(self) -> dict[str, Any]:
        """Return the class name, the plan's expected batch size and the options."""
        return {
            "kind": type(self).__name__,
            "expected_batch": self._expected_batch,
            "accepted_batch": self._accepted_batch,
            "acceptance": self._acceptance,
            "gain": self._gain,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; raise an error if this steering could never reach it."""
        most = 0.0 if self._acceptance is None else _MOST_LOG_SCALE
        ranges = {"accepted_share": (0.0, 1.0), "log_clip_scale": (-most, most)}
        if state.keys() != ranges.keys():
            raise OwnerwiseError(
                f"the stored state of the steering has the entries {sorted(state)}; expected "
                f"{sorted(ranges)}: it is corrupted or belongs to another mechanism"
            )
        problems = [
            f"the stored state of the steering has {name} = {state[name]!r}; expected a number "
            f"from {low:g} to {high:g}: it is corrupted or belongs to another mechanism"
            for name, (low, high) in ranges.items()
            if type(state[name]) not in (int, float) or not low <= state[name] <= high
        ]
        if problems:
            raise OwnerwiseError(problems)
        self.accepted_share = float(state["accepted_share"])
        self._log_clip_scale = float(state["log_clip_scale"])
