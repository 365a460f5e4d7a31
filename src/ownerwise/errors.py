"""Errors that say what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

IS_A_FOLDER = "--out {} is a folder; expected the name of a file"


class OwnerwiseError(ValueError):
    """One or several problems with what the caller gave; `problems` lists all of them."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = "".join(f"\n  {i}. {p}" for i, p in enumerate(self.problems, 1))
            message = f"{len(self.problems)} problems:{lines}"
        super().__init__(message)


class BudgetError(OwnerwiseError):
    """The table of budgets, or who owns which record, is not usable."""


class PlanError(OwnerwiseError):
    """No plan meets the request, or a stored plan is not what it claims to be."""


class AccountingError(OwnerwiseError, ArithmeticError):
    """An accountant cannot give a trustworthy figure; it never returns a made-up one."""


class PrivacyWarning(UserWarning):
    """What was asked for is possible, yet weakens what the guarantee means."""


def name_some(items: Any, label: Callable[[Any], str] = str, *, shown: int = 3) -> str:
    """Return the first of a list or array in words: "a, b, c and 4 more"."""
    named = ", ".join(label(item) for item in items[:shown])
    return f"{named} and {len(items) - shown} more" if len(items) > shown else named


def known_names(given: object, known: Iterable[str]) -> str:
    """Return what was probably meant, and what there is."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), spelled, 1, cutoff=0.5)
    hint = f"did you mean {spelled[near[0]]!r}? " if near else ""
    return f"{hint}Known are {', '.join(spelled.values())}"


def require(module: str, package: str, what: str) -> Any:
    """Return an optional module, or say what to install for it, such as `ownerwise[report]`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OwnerwiseError(
            f"{what} needs {module.partition('.')[0]}: pip install {package!r}"
        ) from None
