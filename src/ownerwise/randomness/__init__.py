"""Randomness: the secret stream, the noise drawn from it, and a model's random layers.

Every random number in a private run comes from this package. It imports only
processes.
"""

from ownerwise.randomness.layers import LayerRandomness, kept_generators
from ownerwise.randomness.noise import FINEST_GRID, Noise, grid_of
from ownerwise.randomness.stream import SecretStream, StepStream, random_order

__all__ = [
    "FINEST_GRID",
    "LayerRandomness",
    "Noise",
    "SecretStream",
    "StepStream",
    "grid_of",
    "kept_generators",
    "random_order",
]
