"""Averages of the models on the way: post-processing of outputs, at no privacy cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_AVERAGE = "average"


class Averaging:
    """Keeps an exponential average of the parameters: noise averages out, the model stays.

    The average is the plain mean at first and forgets by `decay` from step 1 / (1 - decay) on. It
    lies in the optimizer's state, so that checkpoints hold it.

    Args:
        decay: share of the old average that stays in a step, such as 0.99 for about the last 100.
    """

    def __init__(self, decay: float):
        self.decay = decay

    def update(self, optimizer: Optimizer, updates: int) -> None:
        """Take the parameters after update number `updates` into their average."""
        weight = max(1 - self.decay, 1 / updates)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if _AVERAGE in state:
                        state[_AVERAGE].lerp_(parameter, weight)
                    else:
                        state[_AVERAGE] = parameter.detach().clone()

    def finish(self, optimizer: Optimizer) -> None:
        """Put the averages in the parameters' place for good."""
        self._exchange(optimizer)
        for state in optimizer.state.values():
            state.pop(_AVERAGE, None)

    @contextmanager
    def applied(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the model have the averages for a while."""
        self._exchange(optimizer)
        try:
            yield
        finally:
            self._exchange(optimizer)

    def _exchange(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                if _AVERAGE in state:  # not before the first step, and not after `finish`
                    kept = parameter.clone()
                    parameter.copy_(state[_AVERAGE])
                    state[_AVERAGE].copy_(kept)


def averaging_problems(averaging: Any) -> list[str]:
    """Return what is wrong with a decay; None is none."""
    if averaging is None or (isinstance(averaging, float | int) and 0 <= averaging < 1):
        return []
    return [f"averaging={averaging!r}: expected a decay of at least 0 and below 1, such as 0.99"]
