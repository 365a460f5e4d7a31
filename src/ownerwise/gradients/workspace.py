"""Memory blocks that are reused from step to step.

The operating system provides fresh memory page by page on first write, which on the CPU takes
longer than many of the computations that use this memory. *Scratch* blocks are valid only within
one call. *Lent* blocks belong to a contribution and are returned when it is deleted. Of these, only
a limited amount is kept: in a large model, they would lie idle beside the activations of the next
forward pass, whereas fresh blocks take the place of activations that the backward pass has freed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

import torch
from torch import Tensor

__all__ = ["Loan", "Workspace"]

_MOST_KEPT = 64 << 20  # bytes of lent blocks that are kept while nobody uses them


class Loan:
    """A lent block, which is returned when the last reference to the loan is gone."""

    __slots__ = ("_workspace", "block")

    def __init__(self, workspace: Workspace, block: Tensor) -> None:
        self._workspace, self.block = workspace, block

    def __del__(self) -> None:
        self._workspace.give_back(self.block)


class Workspace:
    """The scratch and lent blocks of one tape."""

    def __init__(self, lean: bool = False) -> None:
        self.lean = lean  # if true, lent blocks are not kept for the next step
        self._scratch: dict[object, Tensor] = {}
        # flat blocks, sorted by size
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._kept = 0  # bytes in these blocks

    def scratch(self, key: object, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised block; the next call with the same key may overwrite it."""
        size = math.prod(shape)
        full_key = (key, like.dtype, like.device)
        block = self._scratch.get(full_key)
        if block is None or block.numel() < size:
            block = torch.empty(size, dtype=like.dtype, device=like.device)
            self._scratch[full_key] = block
        return block[:size].view(shape)

    def zeros(self, key: object, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a block that is initially zero; callers must always write to the same entries."""
        full_key = (key, shape, like.dtype, like.device)
        block = self._scratch.get(full_key)
        if block is None:
            block = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._scratch[full_key] = block
        return block

    def lend(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a block that belongs to the caller until it is returned with `give_back`.

        Batch sizes vary, so a block is also used for requests as small as half its size. A larger
        block replaces a smaller one, so memory use does not grow from step to step.
        """
        size = math.prod(shape)
        free = self._free.get((like.dtype, like.device), [])
        at = bisect_left(free, size, key=Tensor.numel)
        if at < len(free) and free[at].numel() <= 2 * size:
            block = free.pop(at)
            self._kept -= block.nbytes
            return block[:size].view(shape)
        if at and 2 * free[at - 1].numel() >= size:
            self._kept -= free.pop(at - 1).nbytes
        room = size if self.lean else size + size // 8
        return torch.empty(room, dtype=like.dtype, device=like.device)[:size].view(shape)

    def loan(self, shape: tuple[int, ...], like: Tensor) -> Loan:
        """Lend a block that is returned when the last reference to the loan is gone."""
        return Loan(self, self.lend(shape, like))

    def give_back(self, block: Tensor) -> None:
        """Return a borrowed block to the pool; the caller must no longer hold views of it."""
        whole = block.new_empty(0).set_(block.untyped_storage())  # type: ignore[call-overload]
        if self.lean or self._kept + whole.nbytes > _MOST_KEPT:
            return
        self._kept += whole.nbytes
        free = self._free.setdefault((block.dtype, block.device), [])
        insort(free, whole, key=Tensor.numel)
