"""Rules for the values of settings, in calls and in configuration files.

Each rule has a test and a description, so a wrong value gets the same message everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ValueRule:
    """A rule for a value: its description, its test, and the meaning of a configuration key."""

    expected: str
    fits: Callable[[Any], bool]
    meaning: str = ""

    def means(self, meaning: str) -> ValueRule:
        """Return a copy of the rule for a key with the given meaning."""
        return replace(self, meaning=meaning)

    def problem(self, name: str, value: Any) -> str:
        """Return the message about a value that does not fit."""
        return f"{name} is {value!r}; expected {self.expected}"


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def elsewhere(expected: str) -> ValueRule:
    """Return the rule for a value that is checked by the code that uses it."""
    return ValueRule(expected, lambda value: True)


def text() -> ValueRule:
    """Return the rule for a string that is not empty."""
    return ValueRule("a string", lambda value: isinstance(value, str) and bool(value))


def flag() -> ValueRule:
    """Return the rule for a Boolean value (true or false)."""
    return ValueRule("true or false", lambda value: isinstance(value, bool))


def whole(least: int | None = None) -> ValueRule:
    """Return the rule for an integer that is at least `least`."""
    words = "a whole number" if least is None else f"a whole number of at least {least}"
    return ValueRule(words, lambda v: is_whole(v) and (least is None or v >= least))


def above(low: float) -> ValueRule:
    """Return the rule for a number above `low`."""
    return ValueRule(f"a number above {low:g}", lambda value: is_number(value) and value > low)


def within(low: float, high: float) -> ValueRule:
    """Return the rule for a number from `low` to `high`."""
    return ValueRule(
        f"a number from {low:g} to {high:g}",
        lambda value: is_number(value) and low <= value <= high,
    )


def between(low: float, high: float) -> ValueRule:
    """Return the rule for a number strictly between `low` and `high`."""
    return ValueRule(
        f"a number between {low:g} and {high:g}",
        lambda value: is_number(value) and low < value < high,
    )


def choice(names: Collection[str]) -> ValueRule:
    """Return the rule for one of several names."""
    return ValueRule(
        f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names
    )


def list_of(words: str, fits: Callable[[Any], bool]) -> ValueRule:
    """Return the rule for a list whose items all pass a test."""
    return ValueRule(words, lambda value: isinstance(value, list) and all(map(fits, value)))


def texts() -> ValueRule:
    """Return the rule for a list of strings."""
    return list_of("a list of strings", lambda value: isinstance(value, str))


def table(words: str, fits: Callable[[Any], bool] = lambda value: True) -> ValueRule:
    """Return the rule for a table whose values all pass a test."""
    return ValueRule(
        words, lambda value: isinstance(value, Mapping) and all(map(fits, value.values()))
    )


def either(words: str, *rules: ValueRule) -> ValueRule:
    """Return the rule for a value that satisfies at least one of several rules."""
    return ValueRule(words, lambda value: any(rule.fits(value) for rule in rules))


POSITIVE = ValueRule("a positive, finite number", above(0).fits)
