"""A clip norm that follows a quantile of the gradient norms, as the plan describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ownerwise.errors import known_names

MIN_CLIP_NORM = 1e-6
"""The square of a clip norm must fit in float32, even after scaling and steering. This limit equals
the smallest clip norm that a step accepts (`mechanisms.SMALLEST_NORM`)."""
CLIP_NORM_RANGE = f"{MIN_CLIP_NORM:g} to {1 / MIN_CLIP_NORM:g}"


@dataclass(frozen=True)
class AdaptiveClipNorm:
    """Let the clip norm follow a quantile of the gradient norms, and pay for it in the plan.

    Pass it as `clip_norm=`. Every step releases one more noised number, which shows whether more or
    fewer gradients than wanted are within the clip norm, and the next step's clip norm depends on
    it. The number comes from the same batch as the gradient, so the plan accounts for both as one
    Gaussian mechanism. All clip norms and the noise are scaled by the same factor: the noise
    multiplier of every owner stays as planned (docs/proofs/adaptive-clipping.md).

    Reference: Andrew, Thakkar, McMahan, Ramaswamy (2021), "Differentially Private Learning with
    Adaptive Clipping"; the number released here is a smooth version of theirs.

    Args:
        quantile: fraction of the gradients that should be within the clip norm.
        initial: the clip norm of the first step (the average over records if clip norms differ).
        rate: how quickly the clip norm changes: a step multiplies it by at most exp(rate).
        release_share: fraction of a step's privacy cost that is spent on the number, unless the
            plan is given `release_std` or `release_share`.
    """

    quantile: float = 0.75
    initial: float = 1.0
    rate: float = 0.2
    release_share: float = 0.01

    def problems(self) -> list[str]:
        """Return all problems with the values."""
        problems = [
            f"{name} {getattr(self, name)!r}: expected a number between 0 and 1"
            for name in ("quantile", "release_share")
            if not _between(getattr(self, name), 0, 1)
        ]
        if not (_is_number(self.rate) and 0 < self.rate <= 1):
            problems.append(f"rate {self.rate!r}: expected a number above 0 and at most 1")
        if not (_is_number(self.initial) and MIN_CLIP_NORM <= self.initial <= 1 / MIN_CLIP_NORM):
            problems.append(f"initial {self.initial!r}: expected {CLIP_NORM_RANGE}")
        return problems

    def as_dict(self) -> dict[str, float]:
        """Return the values by name, as plain floats."""
        return {field.name: float(getattr(self, field.name)) for field in fields(AdaptiveClipNorm)}


def as_clip_norm(given: Any) -> Any:
    """Return the adaptive clip norm that "adaptive" or a table of options describes; else `given`.

    A table with unknown options is returned unchanged; `option_problems` says what is wrong.
    """
    if given == "adaptive":
        return AdaptiveClipNorm()
    if isinstance(given, Mapping) and not option_problems(given):
        return AdaptiveClipNorm(**given)
    return given


def option_problems(given: Mapping[str, Any]) -> list[str]:
    """Return a problem for each unknown option in a table that describes a clip norm."""
    known = [field.name for field in fields(AdaptiveClipNorm)]
    return [f"{name} is unknown; {known_names(name, known)}" for name in given if name not in known]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _between(value: Any, low: float, high: float) -> bool:
    return _is_number(value) and low < value < high
