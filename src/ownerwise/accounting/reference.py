"""The field's reference accountant, dp-accounting, as an independent check of every plan.

Nothing here shares code with the accountants that make plans: discretisation, composition and
conversion are dp-accounting's own. Its privacy loss distributions are the reference for both
kinds of plans: an RDP-made plan must lie below its targets there too, and by far.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from ownerwise.accounting.curves import gaussian_mu
from ownerwise.accounting.schedule import Schedule
from ownerwise.errors import AccountingError

OVERSTATEMENT = 2e-4
"""Aimed-at overstatement of epsilon by the reference's grid; plans leave room for it."""


def name() -> str:
    """Return what the reference is called, with its version."""
    return f"dp-accounting {version('dp-accounting')} PLD"


def epsilon(
    rate: float, multiplier: float, schedule: Schedule, delta: float, target: float
) -> float:
    """Return the reference's epsilon; `target` only sets how finely it computes."""
    if rate == 0.0 or schedule.steps == 0:
        return 0.0
    result = float(_compose(rate, multiplier, schedule, delta, target))
    if not (np.isfinite(result) and result >= 0):
        raise AccountingError(
            f"the reference accountant returned {result} for rate {rate:g}, noise multiplier "
            f"{multiplier:g}, {schedule.steps} steps, delta {delta:g}"
        )
    return result


def _compose(
    rate: float, multiplier: float, schedule: Schedule, delta: float, target: float
) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    # A grid of width w adds about T w^2 order / 12 to epsilon (see pld.py), the order being where
    # a Gaussian of the same budget decides delta.
    order = 1.5 + target / gaussian_mu(target, delta) ** 2
    width = min(5e-3, np.sqrt(12.0 * OVERSTATEMENT * target / (schedule.steps * order)))
    composed = None
    for count, factor in schedule.segments:
        step = privacy_loss_distribution.from_gaussian_mechanism(
            multiplier * factor,
            sampling_prob=rate,
            value_discretization_interval=width,
            log_mass_truncation_bound=float(min(-50.0, np.log(delta / schedule.steps) - 12.0)),
        )
        part = step.self_compose(count) if count > 1 else step
        composed = part if composed is None else composed.compose(part)
    assert composed is not None
    return composed.get_epsilon_for_delta(delta)
