"""Scores that order the records in a batch; a higher score makes a record more important.

A score may depend on the record itself, on the model (an output of earlier private steps) and on
the plan's public constants, but never on other records. Adding a record therefore does not reorder
the others; INO's sensitivity relies on this (docs/proofs/ino.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ownerwise.randomness import SecretStream
from ownerwise.registry import Registry

if TYPE_CHECKING:
    from ownerwise.planning import Plan

Score = Callable[[np.ndarray, "np.ndarray | None", "Plan | None"], np.ndarray]
"""score(log_losses, owner_index, plan) returns one finite number per record.

Log losses are clamped to a public range. A score must not change by more than the log loss does;
otherwise rounding could change the weights by more than the step allows for.
"""


def pull(plan: Plan) -> np.ndarray:
    """Return each holder's public influence on the update, r_o = sampling rate * clip norm."""
    return plan.holders.sampling_rates * plan.holders.clip_norms


@dataclass(frozen=True)
class ByLoss:
    """The order used in the INO-SGD paper: the records with the highest losses come first."""

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        """Return the log losses."""
        return log_losses


@dataclass(frozen=True)
class BudgetAware:
    """loss * (r_max / r_o)^kappa, where r_o is owner o's public influence and r_max = max r_o.

    An owner's influence is its sampling rate times its clip norm. kappa = 0 orders the records by
    loss; a very large kappa orders them by owner and gives the laxest owners no weight.
    Intermediate values of kappa preserve the weight of strict owners' records and of lax owners'
    records with high losses. The score depends only on the record's own loss and public constants,
    so INO's guarantee applies.
    """

    kappa: float = 1.0

    def __post_init__(self):
        if not 0 <= self.kappa < float("inf"):
            raise ValueError(f"kappa must be a finite number of at least 0, got {self.kappa}")

    def __call__(
        self, log_losses: np.ndarray, owner_index: np.ndarray | None, plan: Plan | None
    ) -> np.ndarray:
        """Return the log losses, increased for owners with little influence (see `pull`)."""
        pulls = pull(needed_plan(plan))
        return log_losses + self.kappa * np.log(pulls.max() / pulls)[owner_index]


def needed_plan(plan: Plan | None) -> Plan:
    """Return the plan to which a score is bound, or raise an error if there is none."""
    if plan is None:
        raise ValueError(
            "this score uses the owners' sampling rates and clip norms: bind it to a plan first"
        )
    return plan


ORDERS: Registry[Callable[[SecretStream | None], Score]] = Registry(
    "ownerwise.orders", {"loss": lambda stream: ByLoss()}, kind="order", leading=1
)
"""The orders that configuration files can select by name. Each order is a function that returns
a score. The function receives the run's own stream if the seed is fixed, and None otherwise. Other
packages add orders through entry points in the group `ownerwise.orders`."""
