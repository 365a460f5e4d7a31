"""A budget for the memory that may be spent to save time."""

from __future__ import annotations

from dataclasses import dataclass, field

from ownerwise.gradients.workspace import Workspace

__all__ = ["MemoryBudget"]


@dataclass(slots=True)
class MemoryBudget:
    """A limit on the memory that the gradients of one batch may hold.

    Attributes:
        lean: never hold per-record gradients that are larger than the tensors they replace.
        spare_bytes: how much more may be held in total, unless lean.
        chunk_bytes: the working set of one chunk of records, sized to stay in cache.
        workspace: memory that is reused from step to step.
        held: the bytes held so far, minus those they replace.
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
