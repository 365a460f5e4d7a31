"""Importance sampling: records with larger gradients are more likely to be accepted.

Formal guarantee (docs/proofs/dpis.md): given the model before the step, a record of owner o adds a
vector of length C_o or 0 to the sum, depending on its own coin flip. The record therefore changes
the sum by at most C_o, even with INO weights. The step has exactly the same privacy cost as one
with ordinary clipping under the same plan. The options are public; which records were accepted, and
how many, is private.

Published importance-sampling methods divide by the sum of all gradient norms. That sum depends on
every record and would leak information through the scale of the noise, so it is not used here.

Reference: Wei, Bao, Xiao, Yang (2022), "DPIS: An Enhanced Mechanism for Differentially Private SGD
with Importance Sampling"; the mechanism here is a variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.clipping import SMALLEST_NORM, ClippingRule
from ownerwise.mechanisms.steering import AcceptanceSteering
from ownerwise.randomness import StepStream

if TYPE_CHECKING:
    from ownerwise.planning import Plan

_COUNTS_AS_ZERO = SMALLEST_NORM / 10  # in float32, norms up to this value are treated as zero


@dataclass(frozen=True)
class ImportanceSampling(ClippingRule):
    """Random clipping: scale a gradient to length C with probability min(|g|, C) / C, or else to 0.

    The expectation over the coin flips is the clipped gradient g * min(1, C / |g|), so the sum is
    an unbiased but noisier estimate of the sum under `Standard`. Importance sampling pays off if a
    gradient's norm is cheap to compute but the gradient itself is expensive.

    With `accepted_batch` or `acceptance`, the rule adapts based on a noisy count of accepted
    records, which is released at every step. The plan must account for this release
    (`ow.plan(..., release_std=)`; a standard deviation of a tenth of the expected batch size is
    accurate enough).

    Args:
        accepted_batch: approximate number of records to accept per step. The rule uses only as many
            of the plan's candidates as this requires.
        acceptance: approximate fraction of the candidates to accept. All clip norms and the noise
            grow together while too many candidates are accepted, and shrink while too few are.
        gain: how quickly the rule adapts, a number between 0 and 1.

    Example:
        >>> from ownerwise import SecretStream
        >>> rule = ImportanceSampling()
        >>> stream = SecretStream.from_seed(0).at_step(0)
        >>> rule.factors(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), stream)
        tensor([0.0000, 0.2500])
    """

    accepted_batch: float | None = None
    acceptance: float | None = None
    gain: float = 0.2

    randomised = True

    def __post_init__(self):
        batch, acceptance, gain = self.accepted_batch, self.acceptance, self.gain
        problems = []
        if batch is not None and not _between(batch, 0, float("inf")):
            problems.append(f"accepted_batch {batch!r}: expected a positive finite number")
        if acceptance is not None and not _between(acceptance, 0, 1):
            problems.append(f"acceptance {acceptance!r}: expected a number between 0 and 1")
        if not _between(gain, 0, 1):
            problems.append(f"gain {gain!r}: expected a number between 0 and 1")
        if problems:
            raise OwnerwiseError(problems)

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return C / |g| for accepted records and 0 for the others.

        A norm below t = C * sqrt(machine epsilon) may consist entirely of rounding error (a ghost
        norm is the square root of a sum with cancellation). Such a norm is treated as zero instead
        of being scaled up to C. Above t, a record is accepted with probability (|g| - t) / (C - t).
        This probability is continuous at t, so a rounding error in the norm changes it only
        slightly. The threshold lowers the norm of a record's expected contribution by at most t.
        """
        if stream is None:
            raise ValueError("importance sampling needs the step's secret random numbers")
        draws = torch.from_numpy(stream.uniforms(len(norms))).to(norms.device)
        least = clip_norms * torch.finfo(norms.dtype).eps ** 0.5
        if norms.dtype != torch.float64:
            least = least.clamp(min=_COUNTS_AS_ZERO)
        accepted = draws * (clip_norms - least).clamp(min=0) < norms - least
        return torch.where(accepted, clip_norms / norms, torch.zeros_like(norms))

    def steering(self, plan: Plan) -> AcceptanceSteering | None:
        """Return the adaptation state for one run, or None if no target was given."""
        if self.accepted_batch is None and self.acceptance is None:
            return None
        return AcceptanceSteering(
            plan.expected_batch_size, self.accepted_batch, self.acceptance, self.gain
        )


def _between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low < value < high
