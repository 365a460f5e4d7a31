"""Packed sequences: what torch sorts by length and orders by time is put back as it was.

A packed sequence holds the entries of all records for the first time step, then those for the
second, and so on, with the longest record first. Recurrent layers need to know which record an
entry belongs to, so the tape notes how `pack_padded_sequence` has sorted the records. If a packed
sequence was made in another way, its records are taken to be in the order of the losses; as for
every layout, the backward pass checks this.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ownerwise.gradients.calls import Function
from ownerwise.gradients.rules.context import Context

__all__ = ["Packing", "index_select", "pack"]


class Packing:
    """How the entries of a packed sequence correspond to records and time steps.

    Args:
        sizes: the number of records at each time step.
        order: the record at each place of the first time step; None if they are in order.

    Attributes:
        real: for each time step, which records have an entry, each `[records, 1]`.
    """

    def __init__(self, sizes: Tensor, order: Tensor | None) -> None:
        sizes = sizes.cpu()
        self.shape = len(sizes), int(sizes[0])
        self.order = order
        places = torch.arange(self.shape[1])
        mask = places < sizes[:, None]  # [time, places], the order of the packed entries
        self._times, self._places = mask.nonzero(as_tuple=True)
        if order is not None:
            mask = mask[:, _inverse(order.cpu())]
        self.real = mask[..., None].unbind(0)

    def unpacked(self, entries: Tensor) -> Tensor:
        """Return `[time, records, features]`, records in order; missing entries are 0."""
        index = self._index(entries)
        empty = entries.new_zeros(*self.shape, *entries.shape[1:])
        return empty.index_put(index, entries)

    def packed(self, unpacked: Tensor) -> Tensor:
        """Return the entries of the packed sequence."""
        return unpacked[self._index(unpacked)]

    def in_order(self, states: Tensor) -> Tensor:
        """Return states `[layers, places, features]` in the order of the records."""
        return states if self.order is None else states.index_select(1, _inverse(self.order))

    def sorted(self, states: Tensor) -> Tensor:
        """Return states `[layers, records, features]` in the order of the packed sequence."""
        return states if self.order is None else states.index_select(1, self.order)

    def _index(self, like: Tensor) -> tuple[Tensor, Tensor]:
        times, places = self._times.to(like.device), self._places.to(like.device)
        return times, places if self.order is None else self.order[places]


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def index_select(context: Context, func: Function, input: Tensor, dim: int, index: Tensor) -> Any:
    """Note the index, which may sort the records before they are packed."""
    if context.tracked(input) is not None:
        return NotImplemented
    output = func(input, dim, index)
    context.selected[id(output)] = weakref.ref(output), dim, index
    return output


def pack(
    context: Context, func: Function, input: Tensor, lengths: Tensor, batch_first: bool
) -> Any:
    """Note the order of the records in a packed sequence, if an index has sorted them."""
    if context.tracked(input) is not None:
        return NotImplemented
    entries, sizes = func(input, lengths, batch_first)
    made, dim, index = context.selected.get(id(input), (None, 0, None))
    if made is not None and index is not None and made() is input:
        along = dim % input.dim() == (0 if batch_first else 1)
        if along and torch.equal(index.sort().values.cpu(), torch.arange(len(index))):
            context.packings[id(sizes)] = sizes, index
    return entries, sizes
