"""Synthetic pictures: dead leaves, a public stand-in for photographs.

A picture is covered with opaque shapes of random size, place and colour, which hide each other like
leaves on the ground. The shapes' sizes follow a power law, so the pictures have edges at all scales
and statistics similar to those of photographs. They depend on nothing but a seed.

References:
    Lee, Mumford, Huang (2001), "Occlusion Models for Natural Images".
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

SIZE = 256
"""Height and width of a picture."""

_FINER = 2  # drawn at this multiple of the size, and averaged, so that edges are smooth
_SMALLEST = 4  # radius of the smallest shapes, in pixels
_COVERED = 0.999
_MOST_SHAPES = 4000
_WARM, _GREEN = np.array([1, 0, -1]), np.array([0.5, -1, 0.5])  # directions of colour
_SIDES = (64, 96, 128, 192, 256)  # of the squares that become small images
_CONTRAST = (0.12, 0.4)  # smallest and largest standard deviation of an image's pixels


def small_images(pictures: int, count: int, side: int, seed: int) -> Tensor:
    """Return images cut from dead leaves and reduced in size, float32 [count, 3, side, side].

    Images with little or extreme contrast are left out.
    """
    generator = np.random.default_rng(seed)
    leaves = [dead_leaves(generator) for _ in range(pictures)]
    found: list[Tensor] = []
    while len(found) < count:
        picture = leaves[generator.integers(pictures)]
        square = generator.choice(_SIDES)
        top, left = generator.integers(SIZE - square + 1, size=2)
        cut = picture[None, :, top : top + square, left : left + square]
        image = functional.interpolate(
            cut, [side] * 2, mode="bilinear", antialias=True, align_corners=False
        )[0]
        if _CONTRAST[0] < float(image.std()) < _CONTRAST[1]:
            found.append(image)
    return torch.stack(found)


def dead_leaves(generator: np.random.Generator) -> Tensor:
    """Return one picture with pixels in [0, 1], float32 [3, SIZE, SIZE]; shapes from the front."""
    size = SIZE * _FINER
    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    picture = np.zeros((size, size, 3), np.float32)
    free = np.ones((size, size), bool)
    for _ in range(_MOST_SHAPES):
        radius = _radius(generator.random(), _SMALLEST * _FINER, size / 2)
        centre = generator.uniform(-radius, size + radius, 2)
        low = np.clip(centre - 1.5 * radius, 0, size).astype(int)
        high = np.clip(centre + 1.5 * radius + 1, 0, size).astype(int)
        window = slice(low[0], high[0]), slice(low[1], high[1])
        down, right = rows[window] - centre[0], columns[window] - centre[1]
        angle = generator.uniform(0, np.pi)
        along = np.cos(angle) * right + np.sin(angle) * down
        across = np.cos(angle) * down - np.sin(angle) * right
        shape = _shape(generator, along / radius, across / radius) & free[window]
        colour = _colour(generator)
        slope = generator.normal(0, 0.25, 2) / radius  # of the shading
        shading = (slope[0] * along + slope[1] * across)[shape]
        picture[window][shape] = np.clip(colour + shading[:, None], 0, 1)
        free[window] &= ~shape
        if free.mean() < 1 - _COVERED:
            break
    pixels = torch.from_numpy(picture).permute(2, 0, 1)
    return functional.avg_pool2d(pixels[None], _FINER)[0]


def _radius(share: float, smallest: float, largest: float) -> float:
    """Return the radius below which a share of the shapes lies, for densities like radius^-3."""
    return (smallest**-2 - share * (smallest**-2 - largest**-2)) ** -0.5


def _shape(generator: np.random.Generator, along: np.ndarray, across: np.ndarray) -> np.ndarray:
    """Return the pixels of an ellipse, a rectangle or a triangle, in units of its radius."""
    aspect, kind = generator.uniform(0.4, 1), generator.integers(3)
    if kind == 0:
        return along**2 + (across / aspect) ** 2 < 1
    if kind == 1:
        return (abs(along) < 1) & (abs(across) < aspect)
    return (across > -0.6 * aspect) & (across + 1.7 * aspect * abs(along) < aspect)


def _colour(generator: np.random.Generator) -> np.ndarray:
    """Return a colour: mostly light or dark, less warm or cold, least green or purple."""
    light, warm, green = generator.random(), generator.normal(0, 0.12), generator.normal(0, 0.06)
    return np.clip(light + warm * _WARM + green * _GREEN, 0, 1).astype(np.float32)
