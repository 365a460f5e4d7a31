"""Format numbers as text for readers, suitably rounded and with units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Amount:
    """A mean over seeds; `deviation` is the standard deviation, or None for a single run."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Amount:
        """Return the mean and sample standard deviation of one value per seed."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))


def name_of(value: object) -> str:
    """Return a class, a group or a cell as text: 1, 1.0 and "1" become "1".

    Missing values turn columns of ints into floats.
    """
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def percent(share: float) -> str:
    """Format a fraction as a percentage: "71.2%"."""
    return "unknown" if not math.isfinite(share) else f"{100 * share:.1f}%"


def points(share: float) -> str:
    """Format a fraction in percentage points: "4.1 points"."""
    return f"{100 * share:.1f} points"


def signed_points(share: float) -> str:
    """Format a difference with its sign: "+4.1 points", or "0.0 points" if it rounds to zero."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f} points".replace("-", "−") if rounded else "0.0 points"


def amount(value: Amount | None) -> str:
    """Format a mean in percent with its standard deviation: "71.2 ± 0.4"."""
    if value is None:
        return "–"
    deviation = "" if value.deviation is None else f" ± {100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{deviation}"


def epsilon(value: float) -> str:
    """Format an epsilon, rounded to three significant digits."""
    return f"{value:.3g}"


def delta(value: float) -> str:
    """Format a delta, rounded up to two significant digits, with an unpadded exponent: "1e-5"."""
    return up(value, 2).replace("e-0", "e-")


def delta_span(low: float, high: float) -> str:
    """Format a range of deltas ("1e-6 to 1e-5"), or a single delta if both ends look the same."""
    return _joined(delta(low), delta(high))


def span(low: float, high: float, digits: int = 3) -> str:
    """Format a range ("0.5 to 8"), or a single number if both ends look the same."""
    return _joined(f"{low:.{digits}g}", f"{high:.{digits}g}")


def up(value: float, digits: int = 4) -> str:
    """Format a promised or spent amount, rounded up so that it is never understated."""
    text = f"{value:.{digits}g}"
    if float(text) >= value * (1 - 1e-12):
        return text
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{float(text) + unit:.{digits}g}"


def down(value: float, digits: int = 4) -> str:
    """Format a lower bound, rounded down so that it is never overstated."""
    text = f"{value:.{digits}g}"
    if float(text) <= value * (1 + 1e-12):
        return text
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{float(text) - unit:.{digits}g}"


def span_up(low: float, high: float, digits: int = 4) -> str:
    """Format a range like `span`, with both ends rounded up."""
    return _joined(up(low, digits), up(high, digits))


def _joined(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def percent_up(share: float, places: int = 2) -> str:
    """Format the spent fraction of a budget, rounded up so it is never understated: "99.81%"."""
    units = math.ceil(100 * 10**places * share - 1e-6)
    return f"{units / 10**places:.{places}f}%"


def whole(count: float) -> str:
    """Format a count with thousands separators: "12,000"."""
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Format a duration: "4.5 s", "45 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
