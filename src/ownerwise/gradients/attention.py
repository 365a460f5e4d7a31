"""Multi-head attention: the body of torch's own function, run in sight of the tape.

``torch.nn.functional.multi_head_attention_forward`` is one torch function; its four projections are
invisible from outside. It is plain Python, so the same code is run with its inner calls tapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ownerwise.gradients.linear import project
from ownerwise.gradients.pointwise import as_single_record
from ownerwise.gradients.problems import Refused

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["multi_head_attention"]

_forward: Any = functional.multi_head_attention_forward
_body = FunctionType(
    _forward.__code__,
    {
        **_forward.__globals__,
        "has_torch_function": lambda tensors: False,
    },
    argdefs=_forward.__defaults__,
)
_signature = inspect.signature(_forward)


def multi_head_attention(tape: Tape, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rule of ``multi_head_attention_forward``."""
    call = _signature.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query = given["query"]
    if query.dim() != 3:
        raise Refused(
            "multi_head_attention_forward",
            f"input of {query.dim()} dimensions, without a batch dimension",
            "pass [records, time, features] (batch_first) or [time, records, features]",
        )
    if tape.source(query) is None and _is_plain(given):
        return _self_attention(tape, given), None
    if query.shape[1] == 1:
        inputs = ("query", "key", "value")
        given |= {name: as_single_record(tape, func, given[name]) for name in inputs}
    hint, tape.batch_hint = tape.batch_hint, query.shape[1]  # [time, records, features] inside
    TorchFunctionMode.__enter__(tape)
    try:
        return _body(*call.args, **call.kwargs)
    finally:
        TorchFunctionMode.__exit__(tape, None, None, None)
        tape.batch_hint = hint


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether this is self-attention without masks, extras or returned weights."""
    absent = ("bias_k", "bias_v", "attn_mask", "key_padding_mask", "static_k", "static_v")
    return (
        given["query"] is given["key"] is given["value"]
        and not any(given[name] for name in ("need_weights", "add_zero_attn", "is_causal"))
        and not given["use_separate_proj_weight"]
        and all(given[name] is None for name in absent)
    )


def _self_attention(tape: Tape, given: dict[str, Any]) -> Tensor:
    """The plain case, records first: torch's order of dimensions costs 5 % of a step."""
    query = given["query"].transpose(0, 1)
    together = project(
        tape, functional.linear, query, given["in_proj_weight"], given["in_proj_bias"]
    )
    heads = (
        part.unflatten(2, (given["num_heads"], -1)).transpose(1, 2)
        for part in together.chunk(3, dim=2)
    )
    dropout = given["dropout_p"] if given["training"] else 0.0
    mixed = functional.scaled_dot_product_attention(*heads, dropout_p=dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    output = project(
        tape, functional.linear, mixed, given["out_proj_weight"], given["out_proj_bias"]
    )
    return output.transpose(0, 1)
