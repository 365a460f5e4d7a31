"""Tables that map each torch function to the rule that covers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.rules.attention import multi_head_attention
from ownerwise.gradients.rules.context import Rule
from ownerwise.gradients.rules.convolution import convolution
from ownerwise.gradients.rules.embedding import embedding
from ownerwise.gradients.rules.guards import batch_norm_guard, strided_guard, view_guard
from ownerwise.gradients.rules.linear import linear, matmul
from ownerwise.gradients.rules.normalisation import normalisation
from ownerwise.gradients.rules.pointwise import POINTWISE, pointwise, repeating
from ownerwise.gradients.rules.recurrent import cell, gru, lstm

__all__ = ["BROADCASTS", "GUARDS", "RULES"]

RULES: dict[Callable[..., Any], Rule] = {
    functional.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    functional.conv1d: convolution,
    functional.conv2d: convolution,
    functional.conv3d: convolution,
    functional.embedding: embedding,
    functional.layer_norm: normalisation,
    functional.rms_norm: normalisation,
    functional.group_norm: normalisation,
    functional.instance_norm: normalisation,
    functional.batch_norm: normalisation,
    functional.multi_head_attention_forward: multi_head_attention,
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: gru,  # the same signature
    torch.rnn_relu: gru,
    torch.lstm_cell: cell,
    torch.gru_cell: cell,
    torch.rnn_tanh_cell: cell,
    torch.rnn_relu_cell: cell,
    **dict.fromkeys(POINTWISE, pointwise),
}
"""Calls that combine parameters with data; the fallback handles all other such calls."""

BROADCASTS: dict[Callable[..., Any], Rule] = {
    Tensor.expand: repeating,
    Tensor.expand_as: repeating,
    Tensor.repeat: repeating,
    Tensor.broadcast_to: repeating,
    torch.broadcast_to: repeating,
}
"""Calls that repeat a parameter for every record; they need no data argument."""

GUARDS: dict[Callable[..., Any], Rule] = {
    Tensor.view: view_guard,
    Tensor.as_strided: strided_guard,
    torch.as_strided: strided_guard,
    functional.batch_norm: batch_norm_guard,
}
"""Calls whose tensor arguments are all data, and which need a check or a workaround."""
