"""Features that have no privacy cost: fixed transforms, and extractors trained only on public data.

Anything fitted to private records (components, means, fine-tuned weights) would be released without
noise. An extractor is therefore either a fixed transform (`Scattering`) or a network whose weights
come from public data (`Frozen`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ownerwise.models.scattering import Scattering

__all__ = ["Frozen", "Scattering", "extract"]


def extract(extractor: nn.Module, inputs: Tensor, batch_size: int = 32) -> Tensor:
    """Return the features of all records, computed batch by batch, without gradients."""
    with torch.no_grad():
        return torch.cat([extractor(part) for part in inputs.split(batch_size)])


class Frozen(nn.Module):
    """A module that does not change: it has no gradients and is always in evaluation mode.

    If a frozen module is the first part of a model, only the other parts are trained. A frozen
    module keeps the batch statistics of its public training data.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the module's outputs, detached from the autograd graph."""
        return self.module(x)
