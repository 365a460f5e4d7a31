"""Settings of a run as JSON types: what `config.json` holds, and how two of them differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ownerwise.mechanisms import (
    INO,
    BudgetAware,
    ByLoss,
)
from ownerwise.owners import (
    Owners,
)

_ABSENT = object()


def describe_model(model: nn.Module) -> str:
    """Return the model's class and its number of parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {count:,} parameters"


def describe_data(data: Any) -> str:
    """Return the kind of data: class, or shape and dtype of each array without its rows."""
    if not isinstance(data, tuple):
        return type(data).__name__
    return f"({', '.join(map(_describe_array, data))})"


def _describe_array(array: Any) -> str:
    if not hasattr(array, "dtype"):
        return type(array).__name__
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape[1:])}"


def describe_function(function: Any) -> str:
    """Return the name of a loss or another function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def describe_plug(plug: Any) -> dict[str, Any] | None:
    """Return weights or a clipping rule as its kind and its options."""
    if plug is None:
        return None
    if isinstance(plug, INO):
        return _describe_ino(plug)
    made = dataclasses.is_dataclass(plug) and not isinstance(plug, type)  # a class is refused later
    fields = dataclasses.fields(plug) if made else ()
    options = {field.name: getattr(plug, field.name) for field in fields}
    given = {name: value for name, value in options.items() if value is not None}
    return {"kind": type(plug).__name__, **{n: v for n, v in given.items() if _is_json(v)}}


def _describe_ino(ino: INO) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "INO"}
    found |= {"tail": ino.tail} if ino.tail is not None else {"tail_length": ino.tail_length}
    if ino.shape is None:
        found |= {"alpha": ino.alpha, "beta": ino.beta}
    else:
        found["shape"] = repr(ino.shape)
    if isinstance(ino.score_by, BudgetAware):
        found["kappa"] = ino.score_by.kappa
    elif not isinstance(ino.score_by, ByLoss):
        found["score"] = type(ino.score_by).__name__
    return found


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def owner_budgets(groups: set[str], owners: Owners | None) -> dict[str, float]:
    """Return the epsilon of every group that is named like an owner.

    Where every record is its own owner, ids are numbers of records and name no group.
    """
    if owners is None or len(owners) == owners.total_records:
        return {}
    budgets = zip(map(str, owners.ids.tolist()), owners.epsilon.tolist(), strict=True)
    return {name: epsilon for name, epsilon in budgets if name in groups}


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], ignored: frozenset[str] = frozenset()
) -> list[str]:
    """Return every entry in which two settings differ, in words."""
    old, new = dict(_flat(there)), dict(_flat(here))
    return [
        f"{name} was {_shown(old.get(name, _ABSENT))}, now it is {_shown(new.get(name, _ABSENT))}"
        for name in sorted(old.keys() | new.keys())
        if name.split(".")[0] not in ignored and old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
