"""What may be done to save time: a limit on additional memory, and whether to skip rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from ownerwise.gradients.workspace import Workspace

__all__ = ["MemoryBudget"]


@dataclass(slots=True)
class MemoryBudget:
    """A limit on the memory that the gradients of one batch may occupy.

    Attributes:
        lean: if true, never store per-record gradients larger than the tensors they replace.
        even: if true, rows with the factor 0 are computed like all others, so that the time of a
            sum does not show how many there are.
        spare_bytes: number of additional bytes that may be reserved in total, unless `lean` is
            true.
        chunk_bytes: size of the working set of one chunk of records, chosen to fit in cache.
        workspace: memory that is reused from step to step.
        held: number of additional bytes reserved so far.
    """

    lean: bool = False
    even: bool = False
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
