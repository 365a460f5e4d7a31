"""Clipping rules, which bound each record's gradient by its owner's clip norm.

A rule returns one factor per record, by which the record's gradient g is multiplied. Every rule
must guarantee factor * |g| <= C_o, so that adding or removing a record of owner o changes the sum
by at most C_o (the sensitivity the plan accounts for). A rule may depend only on the record's own
norm, its owner's clip norm and fresh random numbers. The bound holds up to rounding in the dtype of
the norms (1e-6 relative in float32). The step compensates for this by dividing the clip norms that
it passes to the rule by 1 plus its slack, which is at least 1e-4 (`PrivateStep.slack`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ownerwise.mechanisms.plugs import Plug, Steering
from ownerwise.randomness import StepStream

if TYPE_CHECKING:
    from ownerwise.planning import Plan

SMALLEST_NORM = 1e-6
"""The smallest allowed clip norm, and the smallest allowed value of a rule's constant. In float32,
a norm may be too small by up to 1e-10, because squares underflow
(`ownerwise.gradients.precision.HUGE`). Plans have the same limit on `clip_norm`
(`ownerwise.planning.adaptive_clip_norm.MIN_CLIP_NORM`).
"""


class ClippingRule(Plug, ABC):
    """A clipping rule in the private step.

    Attributes:
        randomised: whether `factors` draws from the stream.
    """

    randomised = False

    @abstractmethod
    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return one factor per record, with factor * norm <= clip norm.

        Args:
            norms: finite gradient norms, [records].
            clip_norms: the owners' clip norms, [records].
            stream: the step's secret random numbers, used by randomised rules.
        """

    def steering(self, plan: Plan) -> Steering | None:
        """Return the initial steering for one run, or None if the rule does not adapt."""
        return None


@dataclass(frozen=True)
class Standard(ClippingRule):
    """g * min(1, C / |g|): gradients within the clip norm are unchanged.

    Reference: Abadi et al. (2016), "Deep Learning with Differential Privacy", Algorithm 1.
    """

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return min(1, C / |g|)."""
        return clip_norms / torch.maximum(norms, clip_norms)  # exactly 1 up to the clip norm


@dataclass(frozen=True)
class AutoS(ClippingRule):
    """g * C / (|g| + stability): every gradient is scaled to nearly the clip norm.

    Reference: Bu, Wang, Zha, Karypis (2023), "Automatic Clipping", with the paper's gamma = 0.01.
    """

    stability: float = 0.01

    def __post_init__(self):
        _check_constant("stability", self.stability)

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return C / (|g| + stability)."""
        return clip_norms / (norms + self.stability)


@dataclass(frozen=True)
class Psac(ClippingRule):
    """g * C / (|g| + r / (|g| + r)): like AutoS, but small gradients are scaled up less.

    Reference: Xia et al. (2023), "Differentially Private Learning with Per-Sample Adaptive
    Clipping", with the paper's r = 0.1.
    """

    r: float = 0.1

    def __post_init__(self):
        _check_constant("r", self.r)

    def factors(self, norms: Tensor, clip_norms: Tensor, stream: StepStream | None) -> Tensor:
        """Return C / (|g| + r / (|g| + r))."""
        return clip_norms / (norms + self.r / (norms + self.r))


def _check_constant(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not SMALLEST_NORM <= value < float("inf"):
        raise ValueError(f"{name} must be at least {SMALLEST_NORM:g} and finite, got {value!r}")
