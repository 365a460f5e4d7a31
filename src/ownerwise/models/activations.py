"""Activations, including bounded ones, which keep gradients small before clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ownerwise.errors import OwnerwiseError, known_names

Activation = str | Mapping[str, float] | Callable[[], nn.Module]
"""A name, the three parameters of a tempered sigmoid, or a function that creates the module."""


class TemperedSigmoid(nn.Module):
    """`scale * sigmoid(temperature * x) - offset`, which is tanh with the default parameters.

    References:
        Papernot, Thakurta, Song, Chien, Erlingsson (2021), "Tempered Sigmoid Activations for Deep
        Learning with Differential Privacy".
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each entry."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """Return the three parameters, for `repr`."""
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "tempered-sigmoid": TemperedSigmoid,
}


def activation_maker(activation: Activation) -> Callable[[], nn.Module]:
    """Return a function that creates activation modules.

    Args:
        activation: `"relu"`, `"tanh"` or `"tempered-sigmoid"`; parameters of a tempered sigmoid,
            such as `{"scale": 1.5, "temperature": 3.0, "offset": 0.5}`; or a function that creates
            activation modules.
    """
    if isinstance(activation, Mapping):
        unknown = sorted(set(activation) - {"scale", "temperature", "offset"})
        if unknown:
            raise OwnerwiseError(
                f"a tempered sigmoid has no parameter {', '.join(unknown)}; expected scale, "
                "temperature or offset"
            )
        return lambda: TemperedSigmoid(**activation)
    if not isinstance(activation, str):
        return activation
    if activation not in ACTIVATIONS:
        raise OwnerwiseError(
            f"no activation {activation!r}; {known_names(activation, ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]
