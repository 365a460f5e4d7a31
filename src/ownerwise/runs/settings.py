"""A run's settings as JSON types, as in `config.json`, and how two runs' settings differ."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ownerwise.mechanisms import Plug
from ownerwise.owners import Owners

_ABSENT = object()


def describe_model(model: nn.Module) -> str:
    """Return the model's class and its number of parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {count:,} parameters"


def describe_pretraining(model: nn.Module) -> dict[str, str]:
    """Return the entry "pretraining" if parts of the model state what they were pretrained on."""
    stated = [getattr(module, "pretraining", None) for module in model.modules()]
    words = "; ".join(dict.fromkeys(text for text in stated if isinstance(text, str)))
    return {"pretraining": words} if words else {}


def describe_data(data: Any) -> str:
    """Return the data's class, or each array's dtype and shape without the number of rows."""
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
    """Return the class name and options of weights or a clipping rule."""
    if plug is None:
        return None
    return plug.settings() if isinstance(plug, Plug) else {"kind": type(plug).__name__}


def owner_budgets(groups: set[str], owners: Owners | None) -> dict[str, float]:
    """Return the epsilon of every group that is named after an owner.

    If every record is its own owner, ids are record numbers and do not name groups.
    """
    if owners is None or len(owners) == owners.total_records:
        return {}
    budgets = zip(map(str, owners.ids.tolist()), owners.epsilon.tolist(), strict=True)
    return {name: epsilon for name, epsilon in budgets if name in groups}


def differences(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    ignored: frozenset[str] = frozenset(),
    if_absent: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return a sentence for every entry that differs between the settings of two runs.

    Args:
        before, after: the settings.
        ignored: settings that may differ.
        if_absent: what absent entries stand for, such as {"settings.plan.strict": False}. Absent
            entries that are not listed differ from any value.
    """
    old, new = dict(flat(before)), dict(flat(after))
    known = if_absent or {}

    def differ(name: str) -> bool:
        otherwise = known.get(name, _ABSENT)
        return old.get(name, otherwise) != new.get(name, otherwise)

    return [
        f"{name} was {_shown(old.get(name, _ABSENT))} and is now {_shown(new.get(name, _ABSENT))}"
        for name in sorted(old.keys() | new.keys())
        if name.split(".")[0] not in ignored and differ(name)
    ]


def flat(
    entries: Mapping[str, Any], separator: str = ".", prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield every entry of nested mappings with its path, such as ("optimizer.lr", 0.5)."""
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
