"""Calls of a model that may put its records in another order, depending on the data.

The layout of a tensor is observed once and then kept, because the same calls on tensors of the same
shapes move records in the same way. That does not hold if data decide where a record goes, as in
`x[lengths.argsort()]` or `x[mask]`: if all records of the first batches were in order or equally
long, a kept layout would later assign gradients to other records. Kept layouts are therefore
confirmed in every batch in which such a call occurs. Numbers in indices, as in `x[i]`, are part of
what identifies a sequence of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function, name_of
from ownerwise.torch_internals import pack_padded_sequence, pad_sequence

__all__ = ["RELOCATING", "Relocations"]

_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_JOINING = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack))
_BY_DATA = (
    *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
    *("scatter_reduce_", "index_select", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_put", "index_put_", "index_reduce", "index_reduce_", "take", "take_along_dim"),
    *("masked_select", "masked_scatter", "masked_scatter_", "put", "put_", "sort", "msort"),
    *("topk", "repeat_interleave"),
)

RELOCATING: frozenset[Function] = frozenset(
    (
        *_INDEXED,
        *_JOINING,
        *(getattr(place, n) for n in _BY_DATA for place in (torch, Tensor) if hasattr(place, n)),
        *(functional.embedding, pack_padded_sequence, pad_sequence),
        *(torch.vstack, torch.split, Tensor.split, torch.roll, Tensor.roll),
    )
)
"""Calls that are passed to `Relocations.note`."""


class Relocations:
    """What one forward pass has done that may move records.

    Attributes:
        by_data: whether data may have decided where records went.
        places: the numbers that occurred in indices, in order.
    """

    def __init__(self) -> None:
        self.by_data = False
        self.places: list[Any] = []

    def note(
        self,
        func: Function,
        args: tuple[Any, ...],
        count: int | None,
        is_data: Callable[[Any], bool],
    ) -> None:
        """Note a call in `RELOCATING`.

        Args:
            func, args: the call.
            count: a guess at the number of records.
            is_data: whether a tensor is neither parametric nor constant.
        """
        if func in _INDEXED and len(args) > 1:
            if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                return  # such as x[mask] = 0
            if func is Tensor.__getitem__ and not is_data(args[0]):
                return  # the records are where they are in the index
            self._index(args[1])
        elif func in _JOINING or func is torch.vstack:
            self.by_data |= (
                bool(args) and isinstance(args[0], list | tuple) and (len(args[0]) == count)
            )
        elif func is functional.embedding:
            self.by_data |= len(args) > 1 and is_data(args[1])
        elif name_of(func) in ("split", "roll"):
            self.places.append(repr([arg for arg in args if not isinstance(arg, Tensor)]))
        elif name_of(func) == "repeat_interleave":
            self.by_data |= len(args) > 1 and isinstance(args[1], Tensor)
        else:
            self.by_data = True

    def _index(self, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if part is None or part is Ellipsis or isinstance(part, bool):
                continue
            if isinstance(part, slice):
                self.by_data |= isinstance(part.start, Tensor)
                self.places.append(part.start if isinstance(part.start, int) else None)
            elif isinstance(part, Integral):
                self.places.append(int(part))
            else:
                self.by_data = True
