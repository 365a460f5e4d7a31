"""Average the parameters over steps; this is post-processing and has no privacy cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

_AVERAGE = "average"


class Averaging:
    """Keeps an exponential moving average of the parameters, which averages out noise.

    The average is the plain mean until step 1 / (1 - decay); after that, the weights of older
    updates decay exponentially. The average is kept in the optimizer's state, so checkpoints
    include it.

    Args:
        decay: weight of the old average at each step; 0.99 averages over about the last 100 steps.
    """

    def __init__(self, decay: float):
        self.decay = decay

    def update(self, optimizer: Optimizer, updates: int) -> None:
        """Include the parameters after update number `updates` in their average."""
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
        """Replace the parameters with their averages permanently."""
        self._exchange(optimizer)
        for state in optimizer.state.values():
            state.pop(_AVERAGE, None)

    @contextmanager
    def applied(self, optimizer: Optimizer) -> Iterator[None]:
        """Replace the parameters with their averages within the context."""
        self._exchange(optimizer)
        try:
            yield
        finally:
            self._exchange(optimizer)

    def _exchange(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                if _AVERAGE in state:  # absent before the first step and after `finish`
                    current = parameter.clone()
                    parameter.copy_(state[_AVERAGE])
                    state[_AVERAGE].copy_(current)
