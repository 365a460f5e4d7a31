"""A small convolutional network for private image classification.

References:
    Papernot, Thakurta, Song, Chien, Erlingsson (2021), "Tempered Sigmoid Activations for Deep
    Learning with Differential Privacy".
"""

from __future__ import annotations

from torch import nn

from ownerwise.models.activations import Activation, activation_maker


def mnist_cnn(classes: int = 10, activation: Activation = "tanh") -> nn.Sequential:
    """Return a network for greyscale images of shape [batch, 1, 28, 28].

    With 10 classes, it has 26,010 parameters.
    """
    make = activation_maker(activation)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=2), make(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), make(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), make(), nn.Linear(32, classes)),
    )
