"""The rule for multi-head attention, which runs the body of torch's own function.

`torch.nn.functional.multi_head_attention_forward` is a single torch function, so its projections
are invisible from outside. It is plain Python, however, so the rule runs the same code object again
while the tape traces the calls inside it.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.rules.context import Context
from ownerwise.gradients.rules.linear import project
from ownerwise.gradients.rules.pointwise import as_single_record

__all__ = ["multi_head_attention"]

_forward: Any = functional.multi_head_attention_forward
_body = FunctionType(
    _forward.__code__,
    {**_forward.__globals__, "has_torch_function": lambda tensors: False},  # do not dispatch again
    argdefs=_forward.__defaults__,
)
_signature = inspect.signature(_forward)


def multi_head_attention(context: Context, func: Function, *args: Any, **kwargs: Any) -> Any:
    """Handle `multi_head_attention_forward`."""
    call = _signature.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query = given["query"]
    if query.dim() != 3:
        raise Refused(
            "multi_head_attention_forward",
            f"its input has {query.dim()} dimensions, without a batch dimension",
            "pass [records, time, features] (batch_first) or [time, records, features]",
        )
    if context.tracked(query) is None and _is_plain(given):
        context.reformatted = True
        return _self_attention(context, given), None
    if query.shape[1] == 1:
        inputs = ("query", "key", "value")
        given |= {name: as_single_record(context, func, given[name]) for name in inputs}
    with context.watch(batch_hint=query.shape[1]):  # [time, records, features]
        return _body(*call.args, **call.kwargs)


def _is_plain(given: dict[str, Any]) -> bool:
    """Return whether this is self-attention without masks, extra biases or returned weights."""
    absent = ("bias_k", "bias_v", "attn_mask", "key_padding_mask", "static_k", "static_v")
    return (
        given["query"] is given["key"] is given["value"]
        and not any(given[name] for name in ("need_weights", "add_zero_attn", "is_causal"))
        and not given["use_separate_proj_weight"]
        and all(given[name] is None for name in absent)
    )


def _self_attention(context: Context, given: dict[str, Any]) -> Tensor:
    """Run plain self-attention with records first; with time first, a transformer is 5% slower."""
    query = given["query"].transpose(0, 1)
    together = project(
        context, functional.linear, query, given["in_proj_weight"], given["in_proj_bias"]
    )
    heads = (
        part.unflatten(2, (given["num_heads"], -1)).transpose(1, 2)
        for part in together.chunk(3, dim=2)
    )
    dropout = given["dropout_p"] if given["training"] else 0.0
    mixed = functional.scaled_dot_product_attention(*heads, dropout_p=dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    output = project(
        context, functional.linear, mixed, given["out_proj_weight"], given["out_proj_bias"]
    )
    return output.transpose(0, 1)
