"""Networks by name: the library's own, and those that other packages add."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ownerwise.errors import OwnerwiseError, known_names
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
)
"""The function or class registered under each name. Other packages can add networks through the
entry-point group `ownerwise.models`."""


def build(name: str, **options: Any) -> nn.Module:
    """Return a fresh network.

    Args:
        name: one of `BUILDERS`.
        options: arguments for the function or class with this name, such as `classes=100`.

    Example:
        >>> sum(p.numel() for p in build("mnist-cnn").parameters())
        26010
    """
    return build_from("model", BUILDERS, name, options)


def build_from(
    kind: str,
    builders: Registry[Callable[..., nn.Module]],
    name: str,
    options: Mapping[str, Any],
) -> nn.Module:
    """Return `builders[name](**options)`; the error lists every problem with the options."""
    if name not in builders:
        raise OwnerwiseError(f"no {kind} {name!r}; {known_names(name, builders)}")
    builder = builders[name]
    arguments = inspect.signature(builder).parameters
    problems = [
        f"{kind} {name!r} has no option {option!r}; {known_names(option, arguments)}"
        for option in options
        if option not in arguments
    ]
    problems += [
        f"{kind} {name!r} needs the option {argument.name!r}"
        for argument in arguments.values()
        if argument.default is argument.empty and argument.name not in options
    ]
    if problems:
        raise OwnerwiseError(problems)
    return builder(**options)
