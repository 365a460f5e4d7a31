"""Pixels standardised with constants from the literature.

The means and standard deviations describe the benchmarks' own training images, so they are suitable
for comparison with published results on public data, but not for scaling private images.
"""

from __future__ import annotations

import numpy as np

from ownerwise.data import pixels as plain
from ownerwise.errors import OwnerwiseError

PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
"""Mean and standard deviation of each channel."""


def scale_images(pixels: np.ndarray, name: str, scale: str) -> np.ndarray:
    """Return pixels [records, channels, height, width] as float32.

    Args:
        pixels: whole numbers from 0 to 255.
        name: name of the data set, which selects its published constants.
        scale: "unit" (0 to 1), "signed" (-1 to 1) or "published" ((unit - mean) / deviation, with
            the constants in `PUBLISHED`).
    """
    known = (*plain.SCALES, "published") if name in PUBLISHED else (*plain.SCALES,)
    if scale not in known:
        raise OwnerwiseError(
            f"{name}: scale {scale!r}; expected one of {', '.join(map(repr, known))}"
        )
    if scale != "published":
        return plain.scale_images(pixels, name, scale)
    images = plain.scale_images(pixels, name, "unit")
    mean, deviation = (np.array(values, np.float32)[:, None, None] for values in PUBLISHED[name])
    images -= mean
    images /= deviation
    return images


def scale_grey(pixels: np.ndarray, name: str, scale: str, channels: int) -> np.ndarray:
    """Return grey values [records, height, width] as float32 [records, channels, height, width].

    With `channels` 3, they are repeated for red, green and blue, as extractors of features of
    photographs expect.
    """
    if channels not in (1, 3):
        raise OwnerwiseError(f"channels {channels!r}: expected 1 or 3")
    return scale_images(pixels[:, None], name, scale).repeat(channels, axis=1)


def describe(images: np.ndarray, scale: str) -> str:
    """Return a description of the shape and range of scaled images."""
    if scale == "published":
        return f"float32 images {list(images.shape[1:])}, standardised with published constants"
    return plain.describe(images, scale)
