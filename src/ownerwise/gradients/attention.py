"""Multi-head attention as the composition of tapped projections and plain attention.

``torch.nn.functional.multi_head_attention_forward`` is one torch function; its four projections are
invisible from outside. This is the same computation with each of them tapped. Tensors come as
``[time, record, feature]`` and are turned to ``[record, time, feature]`` inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.linear import project
from ownerwise.gradients.pointwise import as_single_record, spread
from ownerwise.gradients.problems import Refused

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["multi_head_attention"]


def multi_head_attention(
    tape: Tape,
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Rule of ``multi_head_attention_forward`` (``is_causal`` is a hint there; the mask counts)."""
    if query.dim() != 3:
        raise Refused(
            "multi_head_attention_forward",
            f"input of {query.dim()} dimensions, without a batch dimension",
            "pass [records, time, features] (batch_first) or [time, records, features]",
        )
    if static_k is not None or static_v is not None:
        return NotImplemented
    if query.shape[1] == 1:
        query, key, value = (as_single_record(tape, func, t) for t in (query, key, value))
    if any(tape.source(t) is not None for t in (query, key, value)):
        return NotImplemented
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = (in_proj_weight,) * 3
    projections = _projections(
        tape, (query, key, value), weights, in_proj_bias, use_separate_proj_weight
    )
    count = query.shape[1]
    mask = _merged_mask(attn_mask, key_padding_mask, count, num_heads, query.dtype)
    q, k, v = projections
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, spread(tape, func, bias_k, (count, 1, bias_k.shape[-1]))], dim=1)
        v = torch.cat([v, spread(tape, func, bias_v, (count, 1, bias_v.shape[-1]))], dim=1)
        mask = None if mask is None else functional.pad(mask, (0, 1))
    q, k, v = (t.unflatten(2, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    if add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, t.shape[3])], dim=2) for t in (k, v))
        mask = None if mask is None else functional.pad(mask, (0, 1))
    drop = dropout_p if training else 0.0
    attention = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        attention = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        if drop:
            attention = functional.dropout(attention, drop)
        mixed = attention @ v
        if average_attn_weights:
            attention = attention.mean(dim=1)
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, drop)
    mixed = mixed.transpose(1, 2).flatten(2)
    output = project(tape, functional.linear, mixed, out_proj_weight, out_proj_bias, None)
    return output.transpose(0, 1), attention


def _projections(
    tape: Tape,
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor | None, ...],
    bias: Tensor | None,
    separate: bool,
) -> list[Tensor]:
    """Projected query, key and value, ``[record, time, feature]`` each."""
    query, key, value = inputs
    size = query.shape[2]
    weight = weights[0]
    assert weight is not None
    if not separate and query is key and key is value:
        together = project(tape, functional.linear, query.transpose(0, 1), weight, bias, None)
        return list(together.chunk(3, dim=2))
    projected = []
    for number, (tensor, matrix) in enumerate(zip(inputs, weights, strict=True)):
        assert matrix is not None
        rows = (number * size, (number + 1) * size)
        tensor = tensor.transpose(0, 1)
        if not separate:
            projected.append(project(tape, functional.linear, tensor, matrix, bias, rows))
        else:
            plain = project(tape, functional.linear, tensor, matrix, None, None)
            projected.append(_add_rows(tape, plain, bias, rows))
    return projected


def _add_rows(tape: Tape, tensor: Tensor, bias: Tensor | None, rows: tuple[int, int]) -> Tensor:
    """Add rows of the common bias, tapped as a projection of nothing."""
    if bias is None:
        return tensor
    nothing = tensor.new_zeros(*tensor.shape[:-1], 0)
    empty = tensor.new_zeros(tape.value(bias).shape[0], 0)
    return tensor + project(tape, functional.linear, nothing, empty, bias, rows)


def _merged_mask(
    mask: Tensor | None, padding: Tensor | None, count: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one to add to the scores ``[record, head, time, time]``."""
    merged = None
    if mask is not None:
        merged = _additive(mask, dtype)
        merged = merged.unflatten(0, (count, heads)) if mask.dim() == 3 else merged[None, None]
    if padding is not None:
        other = _additive(padding, dtype)[:, None, None, :]
        merged = other if merged is None else merged + other
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
