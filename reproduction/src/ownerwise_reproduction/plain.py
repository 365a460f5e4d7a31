"""Plain SGD: the accuracy of a setting without privacy. NOT PRIVATE, for comparison only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.evaluation import (
    Evaluation,
)
from ownerwise.mechanisms import (
    Loss,
)


def train_plainly(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    validation: Evaluation,
    test: Evaluation | None,
    evaluate_every: int,
    report: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Train on random batches of a fixed size and return history lines in the format of a run.

    Nothing is clipped and no noise is added. The run cannot be resumed.
    """
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, Any]] = []
    seconds = 0.0
    for step in range(steps + 1):
        if step:
            since = time.perf_counter()
            chosen = torch.randint(len(data[0]), (batch_size,), generator=generator)
            optimizer.zero_grad()
            loss(model(data[0][chosen]), data[1][chosen]).backward()
            optimizer.step()
            seconds += time.perf_counter() - since
        if step % evaluate_every == 0 or step == steps:
            line = {
                "step": step,
                "seconds": round(seconds, 4),
                "learning_rate": optimizer.param_groups[0]["lr"],
                "validation": validation(model, loss),
            }
            if test is not None and step == steps:
                line["test"] = test(model, loss)
            history.append(line)
            report(step)
    return history
