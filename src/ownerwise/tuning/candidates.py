"""The candidates of a search: settings that are fixed before any private record is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.planning import PlanRequest
from ownerwise.training import Trainer

MOST_CANDIDATES = 1000


@dataclass(frozen=True)
class Candidate:
    """One choice of settings.

    Attributes:
        settings: what distinguishes the candidate, for the report; public.
        request: the request for its plan.
        make_trainer: makes a Trainer with a NEW model from the plan of a run and the Trainer's
            other options (`seed`, `notes`).
    """

    settings: Mapping[str, Any]
    request: PlanRequest
    make_trainer: Callable[..., Trainer] = field(repr=False)


def expand(space: Any) -> list[dict[str, Any]]:
    """Return the candidates of a space: a list of settings, or lists of values to combine.

    Example:
        >>> expand({"lr": [0.1, 0.5], "clip_norm": [1.0]})
        [{'lr': 0.1, 'clip_norm': 1.0}, {'lr': 0.5, 'clip_norm': 1.0}]
    """
    if isinstance(space, Mapping):
        wrong = [name for name, values in space.items() if not _is_list(values) or not values]
        if wrong or not space:
            raise OwnerwiseError(
                f"the space has {_named(wrong) or 'no settings'}; expected a list of values for "
                "each setting, such as {'lr': [0.1, 0.5]}"
            )
        found = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
    elif _is_list(space) and all(isinstance(one, Mapping) and one for one in space):
        found = [dict(one) for one in space]
    else:
        raise OwnerwiseError(
            "the space is neither a table of lists nor a list of tables; expected settings to "
            "combine, such as {'lr': [0.1, 0.5]}, or a list of candidates, such as [{'lr': 0.1}]"
        )
    if not 2 <= len(found) <= MOST_CANDIDATES:
        raise OwnerwiseError(
            f"the space has {len(found)} candidate{'s'[: len(found) != 1]}; expected 2 to "
            f"{MOST_CANDIDATES}"
        )
    return found


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str)


def _named(names: Sequence[str]) -> str:
    return ", ".join(f"{name!r} without a list of values" for name in names)


def plan_and_training(
    settings: Mapping[str, Any], plan_names: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that are arguments of `ownerwise.plan`, and the others."""
    of_plan = {name: value for name, value in settings.items() if name in plan_names}
    return of_plan, {name: value for name, value in settings.items() if name not in of_plan}
