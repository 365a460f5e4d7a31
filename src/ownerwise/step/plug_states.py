"""Store the states of a step's plugs in checkpoints, and load them only into the same plugs.

The state of a different plug may have the right shape, such as the multipliers of two other
constraints. A checkpoint therefore contains the settings of each plug as well as its state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import Plug

_AS_BEFORE = "build the step as in the original run"


def states_of(plugs: Mapping[str, Plug]) -> dict[str, dict[str, Any]]:
    """Return the state of every plug that has one."""
    return {name: plug.state() for name, plug in plugs.items() if plug.stateful}


def settings_of(plugs: Mapping[str, Plug]) -> dict[str, dict[str, Any]]:
    """Return the settings of every plug that has a state."""
    return {name: plug.settings() for name, plug in plugs.items() if plug.stateful}


def load_states(
    plugs: Mapping[str, Plug],
    states: Mapping[str, dict[str, Any]],
    settings: Mapping[str, dict[str, Any]],
    file: str,
) -> None:
    """Load stored states into the plugs, or raise an error that says what differs.

    Args:
        plugs: the step's plugs by name.
        states: the stored states by name.
        settings: the stored settings by name; none in older checkpoints.
        file: name of the checkpoint, for messages.
    """
    here = settings_of(plugs)
    if states.keys() != here.keys():
        raise OwnerwiseError(
            f"{file} contains the state of {', '.join(states) or 'no plug'}, but this step has "
            f"{', '.join(here) or 'none'}: {_AS_BEFORE}"
        )
    problems = [
        f"the {name} in {file} has {option} = {_text(stored.get(option))}, but this step has "
        f"{_text(here[name].get(option))}: {_AS_BEFORE}"
        for name, stored in settings.items()
        if name in here
        for option in sorted(stored.keys() | here[name].keys())
        if _text(stored.get(option)) != _text(here[name].get(option))
    ]
    if problems:
        raise OwnerwiseError(problems)
    for name, state in states.items():
        try:
            plugs[name].load_state(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise OwnerwiseError(
                f"the state of {name} in {file} does not fit ({type(error).__name__}): {_AS_BEFORE}"
            ) from error


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, sort_keys=True)
