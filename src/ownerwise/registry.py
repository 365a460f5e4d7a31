"""Tables of names that other packages can extend.

A package adds a name with an entry point in the group `ownerwise.datasets` (data sets),
`ownerwise.models` (networks), `ownerwise.extractors` (feature extractors), `ownerwise.assignments`
(methods for assigning records to owners), `ownerwise.orders` (orders of records in INO-SGD) or
`ownerwise.report_sections` (mechanisms' sections in the report). The library's own names take
precedence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """The library's own entries by name, followed by entries from installed packages.

    An entry from another package is imported when it is looked up, not when names are listed.

    Args:
        group: the entry-point group.
        own: the library's own entries.
    """

    def __init__(self, group: str, own: Mapping[str, Entry]):
        self.group = group
        self._own = dict(own)

    def __getitem__(self, name: str) -> Entry:
        return self._own[name] if name in self._own else self._installed[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._installed

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in self._installed if name not in self._own)

    def __len__(self) -> int:
        return len({*self._own, *self._installed})

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        found = entry_points(group=self.group)
        return {point.name: point for point in sorted(found, key=lambda point: point.name)}
