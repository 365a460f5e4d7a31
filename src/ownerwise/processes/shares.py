"""Which elements of a batch each process computes.

All processes draw the same batch from the same stream, so each knows all shares without being
told. Element k belongs to process k % count; in a hardened plan, the elements are in secret rows,
and row k belongs to process k % count, so that removing a record moves no other record to another
process or row.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ownerwise.processes.group import Processes


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a whole batch that this process computes. Everything here is private.

    Attributes:
        processes: the processes.
        of: the process of each element of the whole batch, int64 [elements].
        owner_index: the owner of each element of the whole batch, int64 [elements].
        sizes: the number of records of each element, int64 [elements]: 1, unless owners are drawn.
        rows: the secret row of each element in a hardened plan; None otherwise.
        checksum: checksum of the whole batch's record numbers.
    """

    processes: Processes
    of: np.ndarray = field(repr=False)
    owner_index: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)
    checksum: int = field(default=0, repr=False)

    @classmethod
    def divided(
        cls,
        processes: Processes,
        indices: np.ndarray,
        owner_index: np.ndarray,
        sizes: np.ndarray,
        rows: np.ndarray | None,
    ) -> Share:
        """Divide a batch of these records and elements among the processes."""
        places = np.arange(len(owner_index)) if rows is None else rows
        of = places % processes.count
        return cls(processes, of, owner_index, sizes, rows, zlib.crc32(indices.tobytes()))

    def __len__(self) -> int:
        return len(self.of)

    @cached_property
    def own(self) -> np.ndarray:
        """Positions of this process's elements in the whole batch, int64."""
        return np.flatnonzero(self.of == self.processes.rank)

    @property
    def own_records(self) -> np.ndarray:
        """Positions of this process's records in the whole batch, int64."""
        return np.flatnonzero(np.repeat(self.of == self.processes.rank, self.sizes))

    @property
    def records(self) -> int:
        """Number of records in the whole batch."""
        return int(self.sizes.sum())

    def kept(self, which: np.ndarray) -> Share:
        """Return the share of a batch from which some elements were dropped.

        Args:
            which: whether each element of the whole batch is kept.
        """
        rows = None if self.rows is None else self.rows[which]
        parts = (self.of[which], self.owner_index[which], self.sizes[which])
        return replace(self, of=parts[0], owner_index=parts[1], sizes=parts[2], rows=rows)
