"""Pixels as float32 [records, channels, height, width] in a stated range.

Scaling uses public constants; nothing is computed from the loaded records.
"""

from __future__ import annotations

import numpy as np

from ownerwise.errors import OwnerwiseError

SCALES = {"unit": "0 to 1", "signed": "-1 to 1"}


def scale_images(pixels: np.ndarray, name: str, scale: str, brightest: int = 255) -> np.ndarray:
    """Return pixels [records, channels, height, width] as float32.

    Args:
        pixels: whole numbers from 0 to `brightest`.
        name: the data set's name, for messages.
        scale: "unit" (0 to 1) or "signed" (-1 to 1).
        brightest: the value of a white pixel.
    """
    if scale not in SCALES:
        raise OwnerwiseError(
            f"{name}: scale {scale!r}; expected one of {', '.join(map(repr, SCALES))}"
        )
    images = pixels.astype(np.float32)
    images /= brightest
    if scale == "signed":
        images *= 2
        images -= 1
    return images


def describe(images: np.ndarray, scale: str) -> str:
    """Describe the shape and range of scaled images in words."""
    return f"float32 images {list(images.shape[1:])}, {SCALES[scale]}"
