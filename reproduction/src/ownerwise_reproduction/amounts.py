"""Format means and standard deviations over seeds for the result pages."""

from __future__ import annotations

from ownerwise.wording import Amount


def percent(value: Amount | None) -> str:
    """Return a fraction's mean and standard deviation in per cent, or "" if `value` is None."""
    return "" if value is None else amount(value, 100)


def amount(value: Amount, factor: float = 1.0) -> str:
    """Return the mean and standard deviation to two decimal places, both multiplied by `factor`."""
    deviation = "" if value.deviation is None else f" ± {factor * value.deviation:.2f}"
    return f"{factor * value.mean:.2f}{deviation}"
