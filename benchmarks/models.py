"""The six models of the step benchmark, each with one batch of made-up data.

``build(name)`` gives the model, inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: int
    inputs: Callable[[int], Tensor]
    classes: int


def mlp() -> nn.Module:
    sizes = (21, 47, 47, 47)
    hidden = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(47, 3))


def mnist_cnn() -> nn.Module:
    """26,010 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def cifar_cnn() -> nn.Module:
    """550,570 parameters."""
    layers: list[nn.Module] = []
    width = 3
    for out in (32, 64, 128):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        width = out
    head = (nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))
    return nn.Sequential(*layers, *head)


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


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or width != out:
            convolution = nn.Conv2d(width, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.GroupNorm(32, out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32x32 images (3x3 stem, no pooling after it), group norm with 32 groups."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU(inplace=True),
    ]  # fmt: skip
    width = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, out, stride), Block(out, out, 1)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


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
    """Model, inputs and targets; the same every time."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model()
    return model, case.inputs(case.batch), torch.randint(0, case.classes, (case.batch,))
