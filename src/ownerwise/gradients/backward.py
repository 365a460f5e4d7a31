"""A backward pass that must not reach any parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ownerwise.gradients.problems import Refused

__all__ = ["send_back"]


def send_back(
    model: nn.Module,
    losses: Tensor,
    weights: Tensor,
    parameters: list[nn.Parameter],
    *,
    keep: bool,
    also: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Run one backward pass; raise `Refused` if a parameter receives a gradient.

    Such a parameter was used where the tape did not see it, so its gradient would not be clipped.

    Args:
        model: the model, which supplies the parameter names for messages.
        losses: one loss per record, `[B]`.
        weights: the factor for each loss, `[B]`.
        parameters: the trainable parameters; their `grad` is left as it was.
        keep: whether to keep the graph for another pass; must be False with `also`.
        also: other values to backpropagate in the same call, and the factor for each.
    """
    assert also is None or not keep
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    missed = []
    try:
        if also is None:
            torch.autograd.backward(losses, weights, retain_graph=keep)
        else:
            torch.autograd.backward((losses, also[0]), (weights, also[1]))
        missed = [p for p in parameters if p.grad is not None]
    finally:
        for parameter in missed:
            parameter.grad = None
        for parameter, gradient in before:
            parameter.grad = gradient
    if missed:
        names = {id(p): name for name, p in model.named_parameters()}
        raise Refused(
            ", ".join(names[id(p)] for p in missed),
            "it is used where the tape does not see it (outside the `with` block, in a custom "
            "autograd function, or in compiled code), so it would be trained without clipping",
            "use it inside the `with` block through torch functions, or freeze it",
        )
