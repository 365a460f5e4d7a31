"""Detect changes to a model's parameters that did not come from the private step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ownerwise.torch_internals import OPTIMIZER_STATE, global_step_hooks


class ParameterWatch:
    """Remembers the state of a model's parameters to detect whether anything changes them.

    It compares the torch version counters of all parameters, and the values of the smallest
    trainable parameter: fused optimizers and writes through `.data` do not advance the counters,
    but an optimizer changes every parameter. A write through `.data` that changes only other
    parameters goes undetected; detecting it would require a copy of the model. Buffers such as
    counters may change without using any data, so they are not watched here; `ownerwise.gradients`
    refuses a forward pass that writes data to them.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self._known = set(self.parameters)
        trainable = [p for p in self.parameters if p.requires_grad]
        self._smallest = min(trainable or self.parameters, key=Tensor.numel)
        self._values = self._smallest.detach().clone()
        self.note()

    def note(self) -> None:
        """Remember the current state."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._values.copy_(self._smallest.detach())

    def covers(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether all these parameters are watched."""
        return self._known.issuperset(parameters)

    def written(self) -> bool:
        """Return whether a version counter has advanced since `note`; cheaper than `changed`."""
        return self._versions != [parameter._version for parameter in self.parameters]

    def changed(self) -> bool:
        """Return whether the parameters have detectably changed since the last `note`."""
        if self.written():
            return True
        now = self._smallest.detach()
        if now.shape != self._values.shape:
            return True
        same = torch.equal(now, self._values)
        return not same and not torch.allclose(now, self._values, 0.0, 0.0, equal_nan=True)


def step_hooks(optimizer: Optimizer) -> bool:
    """Return whether functions are registered to run inside the optimizer's step."""
    own = (getattr(optimizer, name, None) for name in OPTIMIZER_STATE)
    return any(own) or any(global_step_hooks)


def learns(optimizer: Optimizer) -> bool:
    """Return whether every parameter group has a learning rate above 0."""
    return all(float(group.get("lr", 1.0)) > 0 for group in optimizer.param_groups)
