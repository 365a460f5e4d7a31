"""Objects described by a name and options: data sets, models, losses, schedules, mechanisms.

A name is one of the library's own, one that an installed package registers with an entry point, or
`package.module:Name` for any object that Python can import. The library's own names take
precedence. The entry-point groups are `ownerwise.datasets`, `ownerwise.models`,
`ownerwise.extractors` (feature extractors), `ownerwise.assignments` (methods for assigning records
to owners), `ownerwise.losses`, `ownerwise.weights`, `ownerwise.orders` (orders of records in
INO-SGD), `ownerwise.clipping_rules`, `ownerwise.releases`, `ownerwise.calibrations` (releases after
training), `ownerwise.repairs` (shifts of the outputs), `ownerwise.noise_schedules`,
`ownerwise.learning_rates`, `ownerwise.loggers` and
`ownerwise.report_sections` (mechanisms' sections in the report).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from ownerwise.errors import OwnerwiseError, known_names

Entry = TypeVar("Entry")
Named = str | Mapping[Any, Any]
"""A name, or a table with the name (as `name` or `kind`) and options."""


class Registry(Mapping[str, Entry]):
    """Maps names to functions, classes or other objects that are created with options.

    An entry from another package is imported when it is looked up, not when names are listed. A
    class with a class method `from_settings`, such as a mechanism, is created by that method.

    Args:
        group: the entry-point group.
        own: the library's own entries.
        kind: what an entry is called in messages.
        leading: number of leading arguments that the library passes; they are not options.
        hidden: further arguments that are not options.
        extra: options that every entry has because the caller handles them before `make`.
        functions: whether a function registered as an entry is itself the result, with options
            bound to it.

    Example:
        >>> import collections
        >>> tables = Registry("made.up", {"counter": collections.Counter, "range": range})
        >>> tables.make({"name": "counter", "red": 2})
        Counter({'red': 2})
        >>> tables.problems("rnage")
        ["name is 'rnage'; did you mean 'range'? Known names: counter, range"]
    """

    def __init__(
        self,
        group: str,
        own: Mapping[str, Entry],
        *,
        kind: str = "name",
        leading: int = 0,
        hidden: Collection[str] = (),
        extra: Collection[str] = (),
        functions: bool = False,
    ):
        self.group = group
        self.kind = kind
        self._own = dict(own)
        self._leading = leading
        self._hidden = hidden
        self._extra = extra
        self._functions = functions

    def __getitem__(self, name: str) -> Entry:
        if name in self._own:
            return self._own[name]
        if name in self._installed:
            return self._installed[name].load()
        if ":" in name:
            return _imported(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and not self._name_problems(name, "")

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._installed if name not in self._own)

    def __len__(self) -> int:
        return len({*self._own, *self._installed})

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        found = entry_points(group=self.group)
        return {point.name: point for point in sorted(found, key=lambda point: point.name)}

    def options(self, name: str) -> dict[str, bool]:
        """Return the options that an entry takes, and whether each is required."""
        return {
            option: parameter.default is parameter.empty
            for option, parameter in self._parameters(name).items()
            if option not in self._hidden and parameter.kind not in _VARIADIC
        }

    def problems(
        self,
        given: Named,
        place: str | None = None,
        prefix: str = "",
        offered: Collection[str] = (),
    ) -> list[str]:
        """Return all problems with a name and the names of its options.

        Args:
            given: the name, alone or with options.
            place: where the name was given, for messages; by default the kind.
            prefix: what to put before the names of options in messages.
            offered: options that the caller passes to `make`, so that they are not required.
        """
        name, options = split(given)
        if problems := self._name_problems(name, self.kind if place is None else place):
            return problems
        known = self.options(name) | dict.fromkeys(self._extra, False)
        if not any(p.kind is p.VAR_KEYWORD for p in self._parameters(name).values()):
            problems += [
                f"{name} has no option {prefix}{option}; "
                + (known_names(option, known) if known else "it takes no options")
                for option in options
                if option not in known
            ]
        return problems + [
            f"{name} needs the option {prefix}{option}"
            for option, needed in known.items()
            if needed and option not in (*options, *offered)
        ]

    def make(self, given: Named, *leading: Any, **offered: Any) -> Any:
        """Return the object that a name and its options describe.

        Args:
            given: the name, alone or with options.
            leading: the leading arguments of the entry.
            offered: arguments for entries that take them, unless they are among the options.

        Raises:
            OwnerwiseError: if the name or an option is unknown or unsuitable.
        """
        if problems := self.problems(given, offered=offered):
            raise OwnerwiseError(problems)
        name, options = split(given)
        taken = self._parameters(name)
        options = {k: value for k, value in offered.items() if k in taken} | options
        maker = self._maker(name)
        if self._functions and not inspect.isclass(maker):
            return functools.partial(maker, **options) if options else maker
        try:
            return maker(*leading, **options)
        except OwnerwiseError:
            raise
        except ValueError as error:
            raise OwnerwiseError(str(error)) from error
        except (TypeError, RuntimeError) as error:
            raise OwnerwiseError(f"{self.kind} {name} cannot be created: {error}") from error

    def _name_problems(self, name: Any, place: str) -> list[str]:
        if isinstance(name, str) and (name in self._own or name in self._installed):
            return []
        if name is None:
            return [f"{place} is missing; expected one of {', '.join(self) or 'none'}"]
        if not isinstance(name, str) or ":" not in name:
            return [f"{place} is {name!r}; {known_names(name, self)}"]
        try:
            _imported(name)
        except (ImportError, AttributeError, ValueError) as error:
            return [
                f"{place} is {name!r}, which cannot be imported ({error}); expected "
                "package.module:Name, with the package installed or on PYTHONPATH"
            ]
        return []

    def _maker(self, name: str) -> Callable[..., Any]:
        entry: Any = self[name]
        return entry if self._leading else getattr(entry, "from_settings", entry)

    def _parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of an entry, without the leading ones that the library passes."""
        entry, maker = self[name], self._maker(name)
        found = _signature(maker)
        if maker is not entry and any(p.kind is p.VAR_KEYWORD for p in found):
            found = _signature(entry)  # from_settings passes its options on to the class
        leading = 0 if self._functions and inspect.isclass(entry) else self._leading
        return {parameter.name: parameter for parameter in found[leading:]}


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def split(given: Named) -> tuple[Any, dict[str, Any]]:
    """Return a name and its options; the name is None if there is none."""
    if not isinstance(given, Mapping):
        return given, {}
    options = dict(given)
    key = "name" if "name" in options else "kind"
    return options.pop(key, None), options


def _imported(name: str) -> Any:
    """Return the object `package.module:Name`; the name may be dotted."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _signature(entry: Any) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(entry).parameters.values()]
    except (TypeError, ValueError):  # implemented in C
        anything = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
        return [anything]
