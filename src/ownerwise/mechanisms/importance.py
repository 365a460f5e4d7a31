"""Importance sampling: records with long gradients are more likely to count.

Formal guarantee (docs/proofs/dpis.md): given the model before the step, a record of owner o adds a
vector of length C_o or 0 to the sum, by a coin of its own, so it moves the sum by at most C_o, with
INO weights too. The step costs exactly what it costs with ordinary clipping at the same plan.
Public: the options. Private: which records were accepted, and how many.

The sum over all gradient norms, by which published importance sampling divides, is not used: it
depends on every record and would leak through the scale of the noise.

Reference: Wei, Bao, Xiao, Yang (2022), "DPIS: An Enhanced Mechanism for Differentially Private SGD
with Importance Sampling"; the form here is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms.steering import AcceptanceSteering
from ownerwise.randomness import (
    StepStream,
)

if TYPE_CHECKING:
    from ownerwise.planning import (
        Plan,
    )


@dataclass(frozen=True)
class ImportanceSampling:
    """Clipping by chance: accepted with probability min(|g|, C) / C, then of length C, else 0.

    The mean over the coins is the clipped gradient, g * min(1, C / |g|): unbiased for what
    `Standard` sums, and with more variance. It pays where a gradient's norm is cheap and the rest
    of its work is dear.

    With `accepted_batch` or `acceptance` the rule steers itself by a noisy count of the accepted
    records, released in every step: the plan must pay for it (`ow.plan(..., release_std=)`; a tenth
    of the expected batch is plenty).

    Args:
        accepted_batch: how many records to accept in a step, about. So many candidates take part
            as that needs, at most all that the plan draws.
        acceptance: share of the candidates to accept, about. All clip norms, and the noise with
            them, grow while more are accepted and shrink while fewer are.
        gain: how quickly the steering follows what it learns, between 0 and 1.

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
    proven = True

    def __post_init__(self):
        batch, share, gain = self.accepted_batch, self.acceptance, self.gain
        problems = []
        if batch is not None and not 0 < batch < float("inf"):
            problems.append(f"accepted_batch {batch}: expected a positive finite number")
        if share is not None and not 0 < share < 1:
            problems.append(f"acceptance {share}: expected a number between 0 and 1")
        if not 0 < gain < 1:
            problems.append(f"gain {gain}: expected a number between 0 and 1")
        if problems:
            raise OwnerwiseError(problems)

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return C / |g| for accepted records and 0 for others.

        A norm below the root of the rounding of C may be made of rounding alone (a ghost norm is
        the root of a sum with cancellation), and lengthening it to C would trust it: it counts as
        zero.
        """
        if stream is None:
            raise ValueError("importance sampling needs the secret random numbers of a step")
        draws = torch.from_numpy(stream.uniforms(len(norms))).to(norms.device)
        resolved = norms > clip_norms * torch.finfo(norms.dtype).eps ** 0.5
        accepted = resolved & (draws * clip_norms < norms)
        return torch.where(accepted, clip_norms / norms, torch.zeros_like(norms))

    def sensitivity(self, clip_norm: float) -> float:
        """Return the clip norm: accepted contributions have that length."""
        return clip_norm

    def steering(self, plan: Plan) -> AcceptanceSteering | None:
        """Return the steering of one run, or None if no target was given."""
        if self.accepted_batch is None and self.acceptance is None:
            return None
        return AcceptanceSteering(
            plan.expected_batch_size, self.accepted_batch, self.acceptance, self.gain
        )
