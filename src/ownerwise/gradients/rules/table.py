"""The table that maps each torch function to the rule that covers it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.calls import Function
from ownerwise.gradients.rules.attention import multi_head_attention
from ownerwise.gradients.rules.context import Rule
from ownerwise.gradients.rules.convolution import convolution
from ownerwise.gradients.rules.embedding import embedding, embedding_bag
from ownerwise.gradients.rules.guards import as_strided, view
from ownerwise.gradients.rules.linear import addmm, linear, matmul
from ownerwise.gradients.rules.normalisation import batch_norm, normalisation
from ownerwise.gradients.rules.packed import index_select, pack
from ownerwise.gradients.rules.pointwise import POINTWISE, pointwise, repeating, tanh
from ownerwise.gradients.rules.recurrent import cell, recurrent
from ownerwise.torch_internals import pack_padded_sequence

__all__ = ["RULES", "WITHOUT_DATA", "WITHOUT_PARAMETERS"]

RULES: dict[Function, Rule] = {
    functional.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    functional.conv1d: convolution,
    functional.conv2d: convolution,
    functional.conv3d: convolution,
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
    functional.layer_norm: normalisation,
    functional.rms_norm: normalisation,
    functional.group_norm: normalisation,
    functional.instance_norm: normalisation,
    functional.batch_norm: batch_norm,
    functional.multi_head_attention_forward: multi_head_attention,
    torch.lstm: recurrent,
    torch.gru: recurrent,
    torch.rnn_tanh: recurrent,
    torch.rnn_relu: recurrent,
    torch.lstm_cell: cell,
    torch.gru_cell: cell,
    torch.rnn_tanh_cell: cell,
    torch.rnn_relu_cell: cell,
    Tensor.expand: repeating,
    Tensor.expand_as: repeating,
    Tensor.repeat: repeating,
    Tensor.broadcast_to: repeating,
    torch.broadcast_to: repeating,
    Tensor.index_select: index_select,
    pack_padded_sequence: pack,
    torch.tanh: tanh,
    Tensor.tanh: tanh,
    Tensor.view: view,
    Tensor.as_strided: as_strided,
    torch.as_strided: as_strided,
    **dict.fromkeys(POINTWISE, pointwise),
}
"""Rules for calls that combine parameters with data; the fallback handles all other such calls."""

WITHOUT_DATA = frozenset({repeating, embedding})
"""Rules that also handle calls with parameters but without data."""

WITHOUT_PARAMETERS = frozenset({batch_norm, view, as_strided, index_select, pack, tanh})
"""Rules that also handle calls with data through which no parameter gradient flows."""
