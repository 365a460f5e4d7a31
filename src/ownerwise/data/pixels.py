"""Pixels as float32 [records, channels, height, width] in a stated range.

Every way of scaling uses constants that are fixed here and known to all; nothing is computed from
the records that are loaded.
"""

from __future__ import annotations

import numpy as np

from ownerwise.errors import OwnerwiseError

SCALES = ("unit", "signed", "published")

PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
"""Mean and standard deviation of each channel as the literature prints them. They describe the
benchmark's own training images: fine for comparing with published results on public data."""


def scale_images(pixels: np.ndarray, name: str, scale: str, brightest: int = 255) -> np.ndarray:
    """Return pixels [records, channels, height, width] as float32.

    Args:
        pixels: whole numbers from 0 to `brightest`.
        name: of the data set, for its published constants.
        scale: "unit": 0 to 1; "signed": -1 to 1; "published": (unit - mean) / deviation of
            `PUBLISHED`.
        brightest: the value of a white pixel.
    """
    if scale not in SCALES or (scale == "published" and name not in PUBLISHED):
        known = SCALES if name in PUBLISHED else SCALES[:2]
        raise OwnerwiseError(
            f"{name}: scale {scale!r}; expected one of {', '.join(map(repr, known))}"
        )
    images = pixels.astype(np.float32)
    images /= brightest
    if scale == "signed":
        images *= 2
        images -= 1
    elif scale == "published":
        mean, deviation = (
            np.array(values, np.float32)[:, None, None] for values in PUBLISHED[name]
        )
        images -= mean
        images /= deviation
    return images


def describe(images: np.ndarray, scale: str) -> str:
    """Return form and range of scaled images in words."""
    ranges = {"unit": "0 to 1", "signed": "-1 to 1", "published": "standardised by constants"}
    return f"float32 images {list(images.shape[1:])}, {ranges[scale]}"
