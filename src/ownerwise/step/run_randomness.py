"""A run's sources of randomness: for the noise, the layers, the rule, the rows and the checks."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ownerwise.mechanisms import Randomness
from ownerwise.planning import Plan
from ownerwise.randomness import LayerRandomness, Noise, SecretStream, StepStream, grid_of
from ownerwise.step.closing import least_share
from ownerwise.step.rounding import GRID_ROOM


class RunRandomness:
    """Draws all random numbers of a run from one secret stream, each for a single purpose.

    Args:
        plan: the run's plan, which determines the noise.
        root: the run's secret stream.
        rule_draws: whether the clipping rule is randomised.
        rank: number of this process. All processes draw the same numbers, except for the checks.
    """

    def __init__(self, plan: Plan, root: SecretStream, *, rule_draws: bool, rank: int = 0):
        self.plan = plan
        self._smallest_clip_norm = float(plan.clip_norms.min())
        self.seed = root.seed
        self.noise = Noise(root)
        self._release_noise = Noise(root, purpose="release")
        self._rule = root.child("clipping rule") if rule_draws else None
        self._layers = root.child("layers")
        parts = root.child(f"parts {rank}" if rank else "parts")
        self._parts = parts.at_step(0)  # for the checks, which do not affect a step
        self._rows = None if plan.hardened_rows is None else root.child("rows")
        self._closing_noise = Noise(root, purpose="closing")
        self._closing_rows = root.child("closing rows")
        self._opening_noise = Noise(root, purpose="opening")

    def of_step(self, step: int) -> Randomness:
        """Return the random numbers for one step, except those for the gradient noise."""
        return Randomness(
            layers=LayerRandomness(lambda: self._layers.at_step(step)),
            rule=self._rule.at_step(step) if self._rule else None,
            rows=self._rows.at_step(step) if self._rows else None,
            parts=self._parts,
            release=lambda total: self._released(step, total),
        )

    def of_closing(self, number: int) -> tuple[StepStream, StepStream]:
        """Return the random numbers for the rows, and for the checks, of a closing sum."""
        return self._closing_rows.at_step(number), self._parts

    def closing(self, number: int, total: Tensor) -> Tensor:
        """Return a closing sum with noise."""
        assert self.plan.closing_std is not None
        grid = grid_of(self.plan.closing_std, total.numel(), GRID_ROOM * least_share(self.plan))
        return self._closing_noise.gaussian(number, [total], self.plan.closing_std, grid)[0]

    def opening(self, total: Tensor, grid: float) -> Tensor:
        """Return the sum before training with noise; both are on the grid."""
        assert self.plan.opening_std is not None
        return self._opening_noise.gaussian(0, [total], self.plan.opening_std, grid)[0]

    def noised(
        self, step: int, sums: dict[nn.Parameter, Tensor], clip_scale: float, factor: float
    ) -> dict[nn.Parameter, Tensor]:
        """Return the sums of a step with noise, times `factor`, in the parameters' dtypes.

        Args:
            step: the step.
            sums: the weighted sum of clipped gradients for each parameter; may be overwritten.
            clip_scale: factor applied to all clip norms and to the noise.
            factor: factor applied to the noised sums.
        """
        std = self.plan.noise_std_at(step) * clip_scale
        numbers = sum(total.numel() for total in sums.values())
        grid = grid_of(std, numbers, GRID_ROOM * self._smallest_clip_norm * clip_scale)
        like = list(sums)
        totals = list(sums.values())
        noised = self.noise.gaussian(step, totals, std, grid, factor, like, overwrite=True)
        return dict(zip(like, noised, strict=True))

    def _released(self, step: int, total: Tensor) -> Tensor:
        std = self.plan.release_std_at(step)
        shares = self.plan.release_shares
        tolerance = GRID_ROOM * (1.0 if shares is None else float(shares.min()))
        if self.plan.release_noise == "laplace":  # its sensitivity is an L1 norm
            scale = std / math.sqrt(2)
            grid = grid_of(scale, total.numel() ** 2, tolerance)
            return self._release_noise.laplace(step, [total], scale, grid)[0]
        grid = grid_of(std, total.numel(), tolerance)
        return self._release_noise.gaussian(step, [total], std, grid)[0]
