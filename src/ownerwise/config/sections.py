"""What a configuration file may hold: every key with what is expected of its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ownerwise.accounting import ACCOUNTANTS
from ownerwise.planning import (
    METHODS,
)
from ownerwise.training import (
    LOGGERS,
)


@dataclass(frozen=True)
class Key:
    """A key: what its value must be, in words and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_segment(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_whole(value[0])
        and value[0] > 0
        and _POSITIVE.fits(value[1])
    )


def _text() -> Key:
    return Key("a text", lambda value: isinstance(value, str) and bool(value))


def _flag() -> Key:
    return Key("true or false", lambda value: isinstance(value, bool))


def _whole(least: int | None = None) -> Key:
    words = "a whole number" if least is None else f"a whole number of at least {least}"
    return Key(words, lambda v: _is_whole(v) and (least is None or v >= least))


def _above(low: float) -> Key:
    return Key(f"a number above {low:g}", lambda value: _is_number(value) and value > low)


def _within(low: float, high: float) -> Key:
    return Key(
        f"a number from {low:g} to {high:g}",
        lambda value: _is_number(value) and low <= value <= high,
    )


def _between(low: float, high: float) -> Key:
    return Key(
        f"a number between {low:g} and {high:g}",
        lambda value: _is_number(value) and low < value < high,
    )


def _choice(names: Collection[str]) -> Key:
    return Key(
        f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names
    )


def _list_of(words: str, fits: Callable[[Any], bool]) -> Key:
    return Key(words, lambda value: isinstance(value, list) and all(map(fits, value)))


def _texts() -> Key:
    return _list_of("a list of texts", lambda value: isinstance(value, str))


def _table(words: str, fits: Callable[[Any], bool] = lambda value: True) -> Key:
    return Key(words, lambda value: isinstance(value, Mapping) and all(map(fits, value.values())))


def _either(words: str, *keys: Key) -> Key:
    return Key(words, lambda value: any(key.fits(value) for key in keys))


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits")

_POSITIVE = _above(0)
CLIPPING: Mapping[str, Mapping[str, Key]] = {
    "standard": {},
    "auto_s": {"stability": _POSITIVE},
    "psac": {"r": _POSITIVE},
    "importance": {
        "accepted_batch": _POSITIVE,
        "acceptance": _between(0, 1),
        "gain": _between(0, 1),
    },
}
"""Clipping rules and their options."""
_BUDGETS = _either(
    "a list of positive numbers, or a table {name = number}",
    _list_of("", _POSITIVE.fits),
    _table("", _POSITIVE.fits),
)

ASSIGNMENT_KEYS: Mapping[str, Key] = {
    "kind": _text(),
    "budgets": _BUDGETS,
    "classes": _table("a table {owner = [classes]}", _texts().fits),
    "seed": _whole(0),
}
"""Keys of an assignment; it may have others, and checks them itself."""

SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "run": {
        "name": _text(),
        "folder": _text(),
        "label": _text(),
        "seed": _whole(),
        "evaluate_every": _whole(1),
        "checkpoint_every": _whole(1),
        "loggers": _list_of(
            f"a list of {' or '.join(LOGGERS)}",
            lambda value: isinstance(value, str) and value in LOGGERS,
        ),
    },
    "data": {
        "name": _text(),
        "options": _table("a table of options of the data set"),
        "only": _texts(),
        "file": _text(),
        "target": _text(),
        "owner": _text(),
        "features": _either("a list of columns, or a table {column = range}", _texts(), _table("")),
        "classes": _list_of("a list", lambda value: isinstance(value, str | int)),
        "columns": _texts(),
        "scale": _choice(("ranges", "statistics", "none")),
        "test_every": _whole(2),
        "validation_share": _between(0, 1),
        "validation_seed": _whole(0),
    },
    "owners": {
        "budgets": _text(),
        "epsilon": _table("a table {owner = positive number, or level}"),
        "column": _text(),
        "levels": _table("a table {level = positive number}", _POSITIVE.fits),
        "assignment": _table("a table with kind and budgets"),
        "delta": _between(0, 1),
    },
    "plan": {
        "method": _choice(METHODS),
        "steps": _whole(1),
        "batch_size": _POSITIVE,
        "noise_multiplier": _POSITIVE,
        "clip_norm": _POSITIVE,
        "accountant": _choice(ACCOUNTANTS),
        "mixture": _within(0, 1),
        "noise_schedule": _either(
            "a name, a table with name and options, or a list of [steps, factor]",
            _text(),
            _table(""),
            _list_of("", _is_segment),
        ),
        "release_std": _POSITIVE,
        "strict": _flag(),
    },
    "model": {"name": _text()},  # and the options of the model
    "training": {
        "optimizer": _choice(OPTIMIZERS),
        "lr": _POSITIVE,
        "momentum": _within(0, 1),
        "options": _table("a table of further options of the optimizer"),
        "schedule": _either("a name, or a table with name and options", _text(), _table("")),
        "averaging": _between(0, 1),
        "loss": _choice(LOSSES),
        "clipping": _either(
            f"one of {', '.join(CLIPPING)}, or a table with kind and options",
            _choice(CLIPPING),
            _table(""),
        ),
        "micro_batch_size": _whole(1),
        "lean": _flag(),
    },
    "weights": {
        "kind": _choice(("ino",)),
        "tail": _within(0, 1),
        "tail_length": _POSITIVE,
        "alpha": _POSITIVE,
        "beta": _POSITIVE,
        "kappa": Key("a number of at least 0", lambda value: _is_number(value) and value >= 0),
        "order": _text(),
        "shape": _either(
            '"beta", "steps", or a list of falling values from 0 to 1',
            _choice(("beta", "steps")),
            _list_of("", _within(0, 1).fits),
        ),
    },
}
"""Sections and keys of a configuration; those of a model are its own."""
