"""Errors that say what was given, what was expected, and what to do about it."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

IS_A_FOLDER = "--out {} is a folder; expected a file name"


def printable(text: object) -> str:
    """Return text on one line, with control characters and direction marks escaped.

    Names come from input tables: a line break in a name could forge a row of a printed table, and a
    direction mark could reverse the digits of a number. All printed text passes through this
    function.
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )


class OwnerwiseError(ValueError):
    """One or more problems with the input; `problems` lists all of them.

    Attributes:
        everywhere: whether all processes of a group raise this error.
    """

    everywhere = False

    def __init__(self, problems: str | Sequence[str]):
        self.problems = list(map(printable, [problems] if isinstance(problems, str) else problems))
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = "".join(f"\n  {i}. {p}" for i, p in enumerate(self.problems, 1))
            message = f"{len(self.problems)} problems:{lines}"
        super().__init__(message)


class BudgetError(OwnerwiseError):
    """The budgets or the owners of the records are invalid."""


class PlanError(OwnerwiseError):
    """No plan satisfies the request, or a stored plan is not valid."""


class AccountingError(OwnerwiseError, ArithmeticError):
    """Raised by an accountant instead of returning an unreliable figure."""


class Problems:
    """Collects problems so that a single error can list all of them.

    Example:
        >>> problems = Problems()
        >>> with problems.guard():
        ...     raise OwnerwiseError("steps 0; expected at least 1")
        >>> problems.add("lr -1; expected a positive number")
        >>> list(problems)
        ['steps 0; expected at least 1', 'lr -1; expected a positive number']
    """

    def __init__(self, found: Iterable[str] = ()) -> None:
        self._found = list(found)

    def add(self, *problems: str) -> None:
        """Add problems to the list."""
        self._found += problems

    def __iadd__(self, problems: Iterable[str]) -> Self:
        self._found += problems
        return self

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Add the problems of an `OwnerwiseError` raised in the `with` block, and continue."""
        try:
            yield
        except OwnerwiseError as error:
            self.add(*error.problems)

    def raise_(self, kind: type[OwnerwiseError] = OwnerwiseError) -> None:
        """Raise an error of this kind that lists all problems, if there are any."""
        if self._found:
            raise kind(self._found)

    def warn(self) -> None:
        """Issue each problem as a warning that points to the code that called the caller."""
        for problem in self._found:
            warnings.warn(problem, stacklevel=3)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)


class PrivacyWarning(UserWarning):
    """The request can be carried out, but it weakens the guarantee."""

    def __init__(self, message: object = ""):
        super().__init__(printable(message))


def name_some(items: Any, label: Callable[[Any], str] = str, *, shown: int = 3) -> str:
    """Return the first items of a list or array as text: "a, b, c and 4 more"."""
    named = ", ".join(printable(label(item)) for item in items[:shown])
    return f"{named} and {len(items) - shown} more" if len(items) > shown else named


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a question that suggests the most similar known name, or "" if none is similar."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), spelled, 1, cutoff=0.5)
    return f"did you mean {spelled[near[0]]!r}?" if near else ""


def known_names(given: object, known: Iterable[str]) -> str:
    """Return a hint with the most similar known name, if any, and all known names."""
    names = list(known)
    return f"{did_you_mean(given, names)} Known names: {', '.join(names)}".lstrip()


def require(module: str, package: str, what: str) -> Any:
    """Return an optional module, or raise an error that says which package to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OwnerwiseError(
            f"{what} needs {module.partition('.')[0]}: pip install {package!r}"
        ) from None
