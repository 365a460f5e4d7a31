"""MiniLM with a linear head, to be trained further on private texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from ownerwise.models.minilm import MiniLM


class MiniLMClassifier(nn.Module):
    """The network all-MiniLM-L6-v2 and a linear layer on its normalised features.

    All 22.6 million parameters can be trained. With noise, fewer are usually better: freeze the
    network and train the head, or add low-rank adapters with peft, whose names for the layers are
    `query`, `key`, `value`, `attended`, `expand` and `project`. For the head alone, features that
    are computed once (`extract(MiniLM(), texts)`) give the same results much faster.

    Args:
        classes: number of classes.
        length: number of word pieces per text, as for `MiniLM`.
        folder: the folder with the weights, as for `MiniLM`.

    Attributes:
        pretraining: what the network was trained on; a Trainer adds it to the card.
    """

    pretraining = MiniLM.pretraining

    def __init__(self, classes: int, length: int = 128, folder: Path | str | None = None) -> None:
        super().__init__()
        self.encoder = MiniLM(length, "layer", folder).requires_grad_(True)
        self.head = nn.Linear(self.encoder.network.norm.normalized_shape[0], classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of the texts' word pieces, int64 [texts, length]."""
        return self.encoder.encode(texts)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the classes, [batch, classes]."""
        return self.head(self.encoder.compute(ids))
