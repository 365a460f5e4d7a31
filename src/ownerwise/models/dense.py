"""Fully connected networks for tabular data, and heads to train on extracted features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from ownerwise.errors import OwnerwiseError
from ownerwise.models.activations import Activation, activation_maker


def mlp(
    inputs: int = 21,
    classes: int = 3,
    hidden: Sequence[int] = (47, 47, 47),
    activation: Activation = "relu",
) -> nn.Sequential:
    """Return a multi-layer perceptron; the defaults suit the cardiotocography data set.

    The network accepts tensors of shape [batch, inputs], or of any other shape with `inputs`
    numbers per record.
    """
    if problems := hidden_problems(hidden):
        raise OwnerwiseError(problems)
    make = activation_maker(activation)
    layers = [m for i, o in pairwise([inputs, *hidden]) for m in (nn.Linear(i, o), make())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear([inputs, *hidden][-1], classes))


def hidden_problems(hidden: Any) -> list[str]:
    """Return the problems with the sizes of the hidden layers."""
    if isinstance(hidden, str) or not np.iterable(hidden):
        return [f"hidden={hidden!r}: expected a list of sizes, such as [{hidden}]"]
    if all(isinstance(size, int | np.integer) and size > 0 for size in hidden):
        return []
    return [f"hidden={hidden!r}: expected whole numbers of at least 1, one for each hidden layer"]


def linear_head(inputs: int, classes: int, bias: bool = True) -> nn.Sequential:
    """Return a linear classifier on features (such as SimCLRv2's 4096 features).

    For features with norm 1, half of a record's squared gradient norm belongs to the biases. If
    classes are about equally frequent, `bias=False` permits a smaller clip norm and less noise.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes, bias))


def mlp_head(
    inputs: int,
    classes: int,
    hidden: Sequence[int] = (512,),
    activation: Activation = "relu",
) -> nn.Sequential:
    """Return a multi-layer perceptron on features (such as EfficientNet-B1's 1280 features)."""
    return mlp(inputs, classes, hidden, activation)


def scattering_head(
    channels: int = 81, size: int = 7, classes: int = 10, groups: int = 27
) -> nn.Sequential:
    """Return a linear classifier on scattering coefficients of shape [batch, channels, size, size].

    Each record is first normalised separately, within groups of channels, so no statistics of the
    data are needed. The defaults are for 28x28 greyscale images; 32x32 colour images need
    channels=243 and size=8.
    """
    normalised = nn.GroupNorm(groups, channels, affine=False)
    return nn.Sequential(normalised, *linear_head(channels * size * size, classes))
