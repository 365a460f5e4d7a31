"""The six models for the step benchmark, each with one batch of synthetic data.

``build(name)`` returns the model, inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ownerwise.models import ResNet18, mlp, mnist_cnn


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: int
    inputs: Callable[[int], Tensor]
    classes: int


class LSTMClassifier(nn.Module):
    def __init__(self, words: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(x))
        return self.head(outputs[:, -1])


class Transformer(nn.Module):
    def __init__(self, words: int = 10_000, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 128)
        self.position = nn.Parameter(0.02 * torch.randn(length, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x) + self.position).mean(dim=1))


def cifar_cnn() -> nn.Module:
    """Return the CIFAR network of Papernot et al. (2021), with 550,570 parameters."""
    layers: list[nn.Module] = []
    width = 3
    for out in (32, 64, 128):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


def resnet18() -> nn.Module:
    return ResNet18()


def images(channels: int, size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, channels, size, size)


def words(length: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, 10_000, (batch, length))


CASES = {
    "mlp": Case(mlp, 256, lambda batch: torch.randn(batch, 21), 3),
    "mnist": Case(mnist_cnn, 512, images(1, 28), 10),
    "cifar": Case(cifar_cnn, 256, images(3, 32), 10),
    "lstm": Case(LSTMClassifier, 256, words(20), 2),
    "transformer": Case(Transformer, 64, words(64), 2),
    "resnet18": Case(resnet18, 64, images(3, 32), 10),
}


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, inputs and targets; they are the same for every call."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model()
    return model, case.inputs(case.batch), torch.randint(0, case.classes, (case.batch,))
