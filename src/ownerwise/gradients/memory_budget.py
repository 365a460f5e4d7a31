"""A limit on the additional memory that may be used to save time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ownerwise.gradients.workspace import Workspace

__all__ = ["MemoryBudget"]


@dataclass(slots=True)
class MemoryBudget:
    """A limit on the memory that the gradients of one batch may occupy.

    Attributes:
        lean: if true, never store per-record gradients larger than the tensors they replace.
        spare_bytes: number of additional bytes that may be reserved in total, unless `lean` is
            true.
        chunk_bytes: size of the working set of one chunk of records, chosen to fit in cache.
        workspace: memory that is reused from step to step.
        held: number of additional bytes reserved so far.
    """

    lean: bool = False
    spare_bytes: int = 192 << 20
    chunk_bytes: int = 3 << 20
    workspace: Workspace = field(default_factory=Workspace)
    held: int = 0

    def may_hold(self, size: int, instead_of: int) -> bool:
        """Reserve `size` bytes in place of `instead_of` bytes, and return whether they fit."""
        extra = size - instead_of
        if extra <= 0:
            return True
        if self.lean or self.held + extra > self.spare_bytes:
            return False
        self.held += extra
        return True
