"""The base class for releases that are made from all records after training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor

from ownerwise.accounting import ClosingRelease
from ownerwise.mechanisms.plugs import Plug

if TYPE_CHECKING:
    from ownerwise.planning import Plan


class Closing(Plug, ABC):
    """Sums over ALL records, released with noise after training, and the correction they imply.

    The plan accounts for the sums (`plan(..., calibration=)`). The step computes the outputs of all
    records, clips every record's contribution to L2 norm 1 (or to the owner's share, if the plan
    has shares), adds the contributions and draws the noise. Later sums may depend on earlier noised
    ones. The correction is computed from noised sums alone, so it has no privacy cost.

    Attributes:
        outside: True if the correction is not part of the model's parameters; this flag is part of
            the state.
    """

    outside: bool = False

    @abstractmethod
    def closing(
        self, epsilon: np.ndarray, delta: np.ndarray, records: np.ndarray
    ) -> ClosingRelease:
        """Return the noise and the number of sums for these public budgets and record counts."""

    @abstractmethod
    def bind(self, plan: Plan) -> Self:
        """Return the release in its initial state for a run under the plan."""

    @abstractmethod
    def contributions(self, outputs: Any, targets: Any) -> Tensor:
        """Return each record's contribution to the next sum, from its own outputs and targets.

        The shape is [records, numbers]. Apart from these, the contribution may depend only on
        earlier noised sums.
        """

    @abstractmethod
    def observe(self, noised: Tensor | None) -> None:
        """Process the next noised sum, [numbers]; None if it was lost after it was charged."""

    @property
    @abstractmethod
    def released(self) -> int:
        """Number of sums observed so far."""

    @property
    @abstractmethod
    def shift(self) -> Tensor | None:
        """The tensor to subtract from the model's outputs, or None if there is none."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the released values and the results derived from them, as JSON types."""
