"""A safeguarded secant method for monotone functions that take milliseconds per call."""

from __future__ import annotations

from collections.abc import Callable

from ownerwise.errors import AccountingError

_SECANTS = 20  # evaluations after which the interval is halved instead


def find_root(
    function: Callable[[float], float],
    guess: float,
    slope: float,
    low: float,
    high: float,
    tolerance: float,
    longest_step: float = 2.0,
) -> float:
    """Return x in [low, high] with |function(x)| <= tolerance.

    `function` must be monotone; `slope` is an estimate of its slope, with the correct sign. If the
    function does not cross zero within the bounds, the bound nearest to the crossing is returned.
    The caller must check the value there.
    """
    rising = slope > 0
    below, above = low, high
    below_seen = above_seen = False
    x = min(max(guess, low), high)
    previous: tuple[float, float] | None = None
    for evaluation in range(100):
        value = function(x)
        if value != value:
            raise AccountingError(f"the cost at {x:g} is not a number; expected a finite cost")
        if abs(value) <= tolerance:
            return x
        if (value < 0) == rising:
            if x == high:
                return high
            below, below_seen = x, True
        else:
            if x == low:
                return low
            above, above_seen = x, True
        if above - below < 1e-12 * max(1.0, abs(x)):
            return below if rising else above  # a jump: take the side where the function is < 0
        if previous is not None:
            secant = (value - previous[1]) / (x - previous[0])
            slope = secant if secant * slope > 0 else slope
        previous = (x, value)
        proposal = x - max(-longest_step, min(longest_step, value / slope))
        if evaluation >= _SECANTS and below_seen and above_seen:  # a jump, or noise in the values
            proposal = 0.5 * (below + above)
        elif proposal >= above:
            proposal = 0.5 * (below + above) if above_seen else above
        elif proposal <= below:
            proposal = 0.5 * (below + above) if below_seen else below
        x = proposal
    raise AccountingError(
        f"no root found between {low:g} and {high:g} in 100 evaluations; the accountant may not "
        "be monotone here. Use accountant='rdp', or a larger delta"
    )
