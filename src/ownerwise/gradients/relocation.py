"""Calls of a model that may put its records in another order, depending on the data.

The layout of a tensor is observed once and then kept, because the same calls on tensors of the same
shapes move records in the same way. That does not hold if data decide where a record goes, as in
`x[lengths.argsort()]` or `x[mask]`: if all records of the first batches were in order or equally
long, a kept layout would later assign gradients to other records. Kept layouts are therefore
confirmed in every batch in which such a call occurs, which takes two or more further backward
passes. Numbers in indices, as in `x[i]`, are part of what identifies a sequence of calls. So is an
index that is a constant 0, 1, 2, ...: it selects the same entries as a slice, and the attention
masks of the transformers library are made with it. Calls that exchange dimensions, or say along
which one to join, are part of it too: a model may choose between two orders in Python, by what the
data say, without any difference in its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

# Their arguments, and which of them is called, decide where the records of their result are.
_ARRANGING = (
    *("transpose", "transpose_", "t", "t_", "adjoint", "permute", "movedim", "moveaxis"),
    *("swapaxes", "swapaxes_", "swapdims", "swapdims_", "flip", "fliplr", "flipud", "rot90"),
    *("unsqueeze", "unsqueeze_", "unbind", "chunk", "split", "roll", "repeat", "tile", "einsum"),
    *("as_strided", "tensordot"),
)
_ARRANGING_CALLS = frozenset(
    (
        *(getattr(place, n) for n in _ARRANGING for place in (torch, Tensor) if hasattr(place, n)),
        *(Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__),  # type: ignore
    )
)

RELOCATING: frozenset[Function] = frozenset(
    (
        *_INDEXED,
        *_JOINING,
        *_ARRANGING_CALLS,
        *(getattr(place, n) for n in _BY_DATA for place in (torch, Tensor) if hasattr(place, n)),
        *(functional.embedding, pack_padded_sequence, pad_sequence),
        torch.vstack,
    )
)
"""Calls that are passed to `Relocations.note`."""


class Relocations:
    """What one forward pass has done that may move records.

    Attributes:
        by_data: whether data may have decided where records went.
        places: the numbers that occurred in indices, in order; for a constant 0, 1, 2, ..., along
            which dimensions it has a single entry; and the calls that arrange dimensions, with
            their numbers.
    """

    def __init__(self) -> None:
        self.by_data = False
        self.places: list[Any] = []

    def note(
        self,
        func: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        count: int | None,
        is_data: Callable[[Any], bool],
    ) -> None:
        """Note a call in `RELOCATING` that has data among its arguments.

        Args:
            func, args, kwargs: the call.
            count: a guess at the number of records.
            is_data: whether a tensor is neither parametric nor constant.
        """
        if func in _ARRANGING_CALLS:
            self._note_numbers(func, args, kwargs)
        elif func in _INDEXED and len(args) > 1:
            if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                return  # such as x[mask] = 0
            if func is Tensor.__getitem__ and not is_data(args[0]):
                return  # the records are where they are in the index
            self._index(args[1], is_data)
        elif func in _JOINING or func is torch.vstack:
            joined = _argument(args, kwargs, 0, "tensors")
            self.by_data |= isinstance(joined, list | tuple) and len(joined) == count
            self._note_numbers(func, args[1:], kwargs)
        elif func is functional.embedding:
            self.by_data |= is_data(_argument(args, kwargs, 1, "weight"))
        elif name_of(func) == "repeat_interleave":
            self.by_data |= isinstance(_argument(args, kwargs, 1, "repeats"), Tensor)
            self._note_numbers(func, args, kwargs)
        elif name_of(func) == "gather":  # the records are where they are in the index
            self.by_data |= is_data(_argument(args, kwargs, 0, "input"))
        elif name_of(func) == "index_select":
            self._index(_argument(args, kwargs, 2, "index"), is_data)
        else:
            self.by_data = True

    def _note_numbers(
        self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        given = [*args, *sorted(kwargs.items())]
        self.places.append((func, repr([value for value in given if _holds_no_tensor(value)])))

    def _index(self, index: Any, is_data: Callable[[Any], bool]) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if part is None or part is Ellipsis or isinstance(part, bool):
                continue
            if isinstance(part, slice):
                self.by_data |= isinstance(part.start, Tensor)
                self.places.append(part.start if isinstance(part.start, int) else None)
            elif isinstance(part, Integral):
                self.places.append(int(part))
            elif isinstance(part, Tensor) and not is_data(part) and _in_order(part):
                # two of them select every pair, or one entry each, by where their sizes are 1
                self.places.append(tuple(size == 1 for size in part.shape))
            else:
                self.by_data = True


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _holds_no_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_holds_no_tensor, value))
    return not isinstance(value, Tensor)


def _in_order(index: Tensor) -> bool:
    """Return whether the entries are 0, 1, 2, ..."""
    if index.dtype == torch.bool or index.is_floating_point():
        return False
    numbers = torch.arange(index.numel(), device=index.device, dtype=index.dtype)
    return torch.equal(index.reshape(-1), numbers)
