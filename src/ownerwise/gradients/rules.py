"""Which rule covers which torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.gradients.attention import multi_head_attention
from ownerwise.gradients.convolution import convolution
from ownerwise.gradients.embedding import embedding
from ownerwise.gradients.fallback import fallback
from ownerwise.gradients.linear import linear, matmul
from ownerwise.gradients.normalisation import NORMALISATIONS, normalisation
from ownerwise.gradients.pointwise import POINTWISE, REPEATING, pointwise, repeating
from ownerwise.gradients.problems import Refused
from ownerwise.gradients.recurrent import cell, gru, lstm, rnn
from ownerwise.gradients.tape import BROADCASTS, FALLBACK, GUARDS, RULES

if TYPE_CHECKING:
    from ownerwise.gradients.tape import Tape

__all__ = ["install"]


def _view(tape: Tape, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``view`` of a tensor that would have been contiguous but for channels-last inside."""
    if tape.channels_last and tensor.dim() == 4 and not tensor.is_contiguous():
        try:
            return func(tensor, *args, **kwargs)
        except RuntimeError:
            if not tensor.is_contiguous(memory_format=torch.channels_last):
                raise
            return func(tensor.contiguous(), *args, **kwargs)
    return func(tensor, *args, **kwargs)


def _strided(
    tape: Tape, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if tape.channels_last and not tensor.is_contiguous():
        raise Refused(
            "as_strided", "the result depends on the memory format", "Tape(channels_last=False)"
        )
    return func(tensor, *args, **kwargs)


def _batch_norm_guard(
    tape: Tape, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    training = kwargs.get("training", args[4] if len(args) > 4 else False)
    if training:
        problem = Refused(
            "batch_norm",
            "batch statistics mix the records",
            "use layer_norm, or group_norm on images",
        )
        if tape.problems is None:
            raise problem
        tape.problems.append(problem.problem)
    return func(input, *args, **kwargs)


def install() -> None:
    """Fill the tables of the tape."""
    RULES[functional.linear] = linear
    for product in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm):
        RULES[product] = matmul
    for convolve in (functional.conv1d, functional.conv2d, functional.conv3d):
        RULES[convolve] = convolution
    RULES[functional.embedding] = embedding
    for normalise in NORMALISATIONS:
        RULES[normalise] = normalisation
    RULES[functional.multi_head_attention_forward] = multi_head_attention
    RULES[torch.lstm] = lstm
    RULES[torch.gru] = gru
    RULES[torch.rnn_tanh] = RULES[torch.rnn_relu] = rnn
    for step in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
        RULES[step] = cell
    for call in POINTWISE:
        RULES[call] = pointwise
    for call in REPEATING:
        BROADCASTS[call] = repeating
    GUARDS[Tensor.view] = _view
    GUARDS[Tensor.as_strided] = _strided
    GUARDS[torch.as_strided] = _strided
    GUARDS[functional.batch_norm] = _batch_norm_guard
    FALLBACK[:] = [fallback]
