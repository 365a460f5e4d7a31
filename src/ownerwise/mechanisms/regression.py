"""A loss for numeric targets with a public range, such as an age, a dose or a length of stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ownerwise.errors import OwnerwiseError

Loss = Callable[..., Tensor]


class RegressionLoss:
    """Compare one output per record with a target that is scaled from a public range to [-1, 1].

    Targets stay in their own units everywhere else: the loss clips each target to the range and
    scales it. Predictions are scaled back and clipped to the range. The range comes from public
    knowledge, so nothing is fitted to the targets. A record's loss depends on that record alone.

    Args:
        low: the lower end of the public range of the targets.
        high: its upper end.
        loss: elementwise loss of an output and a scaled target: `mse_loss`, `l1_loss`,
            `huber_loss` or `smooth_l1_loss` of `torch.nn.functional`.

    Example:
        >>> loss = RegressionLoss(0.0, 200.0)
        >>> loss(torch.tensor([[0.0]]), torch.tensor([150.0])).item()
        0.25
        >>> loss.numbers(torch.tensor([[0.5], [3.0]])).tolist()
        [150.0, 200.0]
    """

    def __init__(self, low: float, high: float, loss: Loss = functional.mse_loss):
        problems = []
        if not _is_range(low, high):
            problems.append(
                f"the range of the targets is {low!r} to {high!r}; expected two finite numbers, "
                "low < high, from public knowledge"
            )
        if loss not in REGRESSION_LOSSES.values():
            known = ", ".join(REGRESSION_LOSSES)
            problems.append(f"loss {getattr(loss, '__name__', loss)!r}: expected one of {known}")
        if problems:
            raise OwnerwiseError(problems)
        self.low, self.high, self.loss = float(low), float(high), loss

    def __call__(self, outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """Return the loss of every record, or their mean or sum."""
        outputs = _one_each(outputs)
        targets = targets.reshape(-1).to(torch.float64).clamp(self.low, self.high)
        scaled = 2 * (targets - self.low) / (self.high - self.low) - 1
        return self.loss(outputs, scaled.to(outputs), reduction=reduction)

    def numbers(self, outputs: Tensor) -> Tensor:
        """Return the predictions in the targets' own units, float64 [records]."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return (middle + half * _one_each(outputs).double()).clamp(self.low, self.high)

    def settings(self) -> dict[str, Any]:
        """Return the range and the loss, as JSON types."""
        return {"range": [self.low, self.high], "loss": getattr(self.loss, "__name__", "")}

    def __repr__(self) -> str:
        return f"{self.loss.__name__} on [{self.low:g}, {self.high:g}]"  # type: ignore


REGRESSION_LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        functional.mse_loss,
        functional.l1_loss,
        functional.huber_loss,
        functional.smooth_l1_loss,
    )
}
"""The elementwise losses that a `RegressionLoss` can use, by name."""


def _is_range(low: Any, high: Any) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (low, high))
    return numbers and math.isfinite(high - low) and low < high


def _one_each(outputs: Tensor) -> Tensor:
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    if outputs.dim() != 1:
        raise OwnerwiseError(
            f"the model's outputs have shape {list(outputs.shape)}; expected one output per "
            "record for a regression, [records] or [records, 1]"
        )
    return outputs
