"""The rule for `embedding`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function
from ownerwise.gradients.contributions import Lookup
from ownerwise.gradients.layout import Layout
from ownerwise.gradients.problems import DEPENDS_ON_BATCH, Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.saved import Saved
from ownerwise.gradients.taps import Use

__all__ = ["embedding"]


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
    """Handle `embedding`; padding rows receive no gradient (pitfall 33)."""
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
    rows = weight.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    output = functional.embedding(input, tracked.value, padding_idx)
    saved = Saved(input, f"embedding({tracked.name})")

    def build(gradient: Tensor, layout: Layout, count: int) -> Iterator[Use]:
        ids = layout.records(saved.get(), count).reshape(count, -1).long()
        parts = layout.records(gradient, count).reshape(count, ids.shape[1], -1)
        if padding_idx is not None:
            parts = parts.masked_fill((ids == padding_idx)[:, :, None], 0)
        yield tracked, Lookup(ids, parts, rows)

    return context.tap(func, output, [tracked], range(input.dim()), build)
