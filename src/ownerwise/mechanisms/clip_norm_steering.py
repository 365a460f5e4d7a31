"""Let all clip norms follow a quantile of the gradient norms, by a noised number at every step.

Formal guarantee (docs/proofs/adaptive-clipping.md): a record adds at most 1 to the number, and the
number comes from the same batch as the sum of gradients, so both are one Gaussian mechanism, which
the plan accounts for. The factor of a step depends only on the numbers of earlier steps and on the
plan, and it applies to all clip norms and to the noise alike. Neither the noise multiplier nor the
sampling rate of any owner changes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ownerwise.batches import Batch
from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.clipping import SMALLEST_NORM, ClippingRule, Standard
from ownerwise.mechanisms.importance import ImportanceSampling
from ownerwise.mechanisms.plugs import Steering
from ownerwise.planning import AdaptiveClipNorm, Plan
from ownerwise.randomness import StepStream

WIDTH = math.log(4.0)
"""A gradient counts as within the clip norm by a fraction that falls from 1 at half of the clip
norm to 0 at twice the clip norm, linearly in the logarithm of its norm."""
_MOST_LOG_SCALE = 10.0
"""Keeps squared clip norms within the range of float32, regardless of what is released."""


class ClipNormSteering(Steering):
    """The clip norm of one run under a plan with an `AdaptiveClipNorm`.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Plan):
        assert plan.adaptive_clip_norm is not None
        self._adaptive = plan.adaptive_clip_norm
        self._initial = plan.clip_norm
        self._expected_batch = plan.expected_batch_size
        self._unit = max(self._adaptive.quantile, 1 - self._adaptive.quantile)
        room = math.log(float(plan.clip_norms.min()) / SMALLEST_NORM)
        self._least = -min(_MOST_LOG_SCALE, max(room, 0.0))
        self._log_clip_scale = 0.0
        self._total = 0.0

    @property
    def keep_probability(self) -> float:
        """Probability that a drawn record is used: 1."""
        return 1.0

    @property
    def clip_scale(self) -> float:
        """Factor applied to all clip norms and to the noise."""
        return math.exp(self._log_clip_scale)

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step (the average over records if clip norms differ)."""
        return self._initial * self.clip_scale

    def select(self, batch: Batch, stream: StepStream | None) -> Batch:
        """Start a step: return the batch unchanged."""
        self._total = 0.0
        return batch

    def observe(self, norms: Tensor, clip_norms: Tensor, factors: Tensor) -> None:
        """Add each record's part: how far within its clip norm it is, minus the quantile.

        The part is divided by the largest possible one, so its absolute value is at most 1. A
        gradient that is not finite counts as far outside.
        """
        norms, clip_norms = (each.to("cpu", torch.float64) for each in (norms, clip_norms))
        ratios = (clip_norms / norms).nan_to_num(nan=torch.inf)  # 0/0: |g| = 0
        within = (0.5 + ratios.log() / WIDTH).clamp(0.0, 1.0)
        within = torch.where(torch.isfinite(norms), within, torch.zeros_like(within))
        self._total += float((within - self._adaptive.quantile).sum()) / self._unit

    @property
    def total(self) -> float:
        """NOT private: the sum of the parts of this step's records."""
        return self._total

    def slack_per_record(self, norm_error: float) -> float:
        """Return how much errors in the norms, both times, may change one other record's part."""
        return 2.0 * math.log1p(norm_error) / WIDTH / self._unit

    def update(self, noisy_total: float) -> None:
        """Finish a step: raise the clip norm if too few gradients are within it, or lower it."""
        excess = noisy_total * self._unit / self._expected_batch
        excess = min(1.0, max(-1.0, excess))  # a fraction; limits the effect of one bad draw
        moved = self._log_clip_scale - self._adaptive.rate * excess
        self._log_clip_scale = min(_MOST_LOG_SCALE, max(self._least, moved))

    def record(self) -> dict[str, float]:
        """Return the clip norm of the next step, which only released numbers determine."""
        return {"clip_norm": self.clip_norm}

    def state(self) -> dict[str, Any]:
        """Return the state for the next step, computed from noised numbers only."""
        return {"log_clip_scale": self._log_clip_scale}

    def settings(self) -> dict[str, Any]:
        """Return the class name and the plan's constants."""
        return {
            "kind": type(self).__name__,
            "expected_batch": self._expected_batch,
            **self._adaptive.as_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; raise an error if this steering could never reach it."""
        value = state.get("log_clip_scale")
        known = state.keys() == {"log_clip_scale"} and type(value) in (int, float)
        if not known or not self._least <= value <= _MOST_LOG_SCALE:  # type: ignore[operator]
            raise OwnerwiseError(
                f"the stored state of the clip norm is {state!r}; expected log_clip_scale, a "
                f"number from {self._least:g} to {_MOST_LOG_SCALE:g}: it is corrupted or belongs "
                "to another mechanism"
            )
        self._log_clip_scale = float(value)  # type: ignore[arg-type]


def steering_for(plan: Plan, rule: ClippingRule) -> Steering | None:
    """Return what adapts clip norms and rates in one run: the plan's clip norm, or the rule."""
    if plan.adaptive_clip_norm is not None and type(rule) is Standard:
        return ClipNormSteering(plan)
    return rule.steering(plan)


def adaptive_problems(adaptive: AdaptiveClipNorm | None, rule: ClippingRule) -> list[str]:
    """Return the reason why a clipping rule cannot be used with an adaptive clip norm."""
    if adaptive is None or type(rule) is Standard:
        return []
    name = type(rule).__name__
    reason = (
        "it may scale every gradient to about the clip norm, which then acts as a learning rate "
        "and has no quantile to follow"
    )
    if isinstance(rule, ImportanceSampling):
        reason = "its option acceptance= adapts the clip norm by itself"
    return [
        f"clipping={name} with an adaptive clip norm: {reason}; expected the standard rule "
        "(clipping=None), or a plan with a fixed clip_norm"
    ]
