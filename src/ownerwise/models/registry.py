"""Networks by name: the library's own, and those that other packages add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ownerwise.models.convolutional import mnist_cnn
from ownerwise.models.dense import linear_head, mlp, mlp_head, scattering_head
from ownerwise.models.residual import ResNet18
from ownerwise.models.text import TextLSTM
from ownerwise.registry import Registry

BUILDERS: Registry[Callable[..., nn.Module]] = Registry(
    "ownerwise.models",
    {
        "mlp": mlp,
        "mnist-cnn": mnist_cnn,
        "resnet18": ResNet18,
        "text-lstm": TextLSTM,
        "linear-head": linear_head,
        "mlp-head": mlp_head,
        "scattering-head": scattering_head,
    },
    kind="model",
)
"""The function or class registered under each name. Other packages can add networks through the
entry-point group `ownerwise.models`."""


def build(name: str, **options: Any) -> nn.Module:
    """Return a fresh network.

    Args:
        name: one of `BUILDERS`, or `package.module:Name` for a class or function of your own.
        options: arguments for the function or class with this name, such as `classes=100`.

    Example:
        >>> sum(p.numel() for p in build("mnist-cnn").parameters())
        26010
    """
    return BUILDERS.make({"name": name, **options})
