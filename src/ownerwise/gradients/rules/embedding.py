"""The rules for `embedding` and `embedding_bag`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function
from ownerwise.gradients.contributions import Lookup
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import DEPENDS_ON_BATCH, Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use

__all__ = ["embedding", "embedding_bag"]


def embedding(
    context: Context,
    func: Function,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Handle `embedding`; padding rows receive no gradient (pitfall 33).

    Without data, as for positions, the result is a derived tensor.
    """
    tracked = context.tracked(weight)
    if tracked is None:
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq:
        what = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise Refused(
            f"embedding({tracked.name})",
            f"{what} {DEPENDS_ON_BATCH}",
            f"build the embedding without {what}",
        )
    if not context.is_data(input):
        return NotImplemented
    rows = weight.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    output = functional.embedding(input, tracked.value, padding_idx)
    saved = Saved(input, f"embedding({tracked.name})")

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        ids = layout.records(saved.get(), count).reshape(count, -1).long()
        parts = layout.records(gradient, count).reshape(*ids.shape, gradient.shape[-1])
        if padding_idx is not None:
            parts = parts.masked_fill((ids == padding_idx)[:, :, None], 0)
        yield tracked, Lookup(ids, parts, rows)

    return context.tap(func, output, [tracked], range(input.dim()), build)


def embedding_bag(
    context: Context,
    func: Function,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Handle `embedding_bag`: an embedding `[bags, longest]`, then a sum, mean or maximum.

    Bags given by offsets are padded to the longest one. What is padding has no part in its bag, so
    the results do not depend on the other bags.
    """
    if context.tracked(weight) is None or context.tracked(per_sample_weights) is not None:
        return NotImplemented
    ids, weights = input, per_sample_weights
    kept = torch.ones_like(ids, dtype=torch.bool)
    if offsets is not None:
        starts = offsets[:-1] if include_last_offset else offsets
        ends = torch.cat([starts[1:], offsets[-1:] if include_last_offset else _end(ids, starts)])
        longest = max(1, int((ends - starts).amax())) if len(starts) else 1
        steps = torch.arange(longest, device=ids.device)
        places = starts[:, None] + steps
        kept = places < ends[:, None]
        places = places.masked_fill(~kept, 0)
        ids = input[places] if len(input) else places
        weights = None if weights is None else weights[places]
    if padding_idx is not None:
        kept = kept & (ids != padding_idx % len(weight))
    with context.watch(batch_hint=len(ids)):
        rows = functional.embedding(
            ids.masked_fill(~kept, 0), weight, None, max_norm, norm_type, scale_grad_by_freq
        )
    if weights is not None:
        rows = rows * weights[..., None]
    if mode == "max":
        empty = ~kept.any(dim=1, keepdim=True)
        rows = rows.masked_fill(~kept[..., None], float("-inf")).max(dim=1).values
        return rows.masked_fill(empty, 0)
    total = rows.masked_fill(~kept[..., None], 0).sum(dim=1)
    if mode == "sum":
        return total
    return total / kept.sum(dim=1, keepdim=True).clamp_min(1).to(total)


def _end(ids: Tensor, starts: Tensor) -> Tensor:
    return starts.new_full((min(1, len(starts)),), len(ids))
