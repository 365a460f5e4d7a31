"""Checks of images, shared by the extractors that read colour images with pixels in [0, 1]."""

from __future__ import annotations

from torch import Tensor

from ownerwise.errors import OwnerwiseError


def check_shape(images: Tensor) -> None:
    """Raise an error unless the images are floats of shape [batch, 3, height, width]."""
    if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise OwnerwiseError(
            f"the images have shape {list(images.shape)} and type {images.dtype}; expected "
            "floats of shape [batch, 3, height, width]; repeat the channel of greyscale images "
            "three times, and divide integer pixel values by 255"
        )


def check_pixels(images: Tensor) -> None:
    """Raise an error unless all pixels are in [0, 1]."""
    if len(images) and not (float(images.min()) >= 0 and float(images.max()) <= 1):
        raise OwnerwiseError(
            f"the pixels are in [{float(images.min()):g}, {float(images.max()):g}] (not "
            "private); expected [0, 1]: divide whole numbers by 255, and do not scale the "
            "images in any other way"
        )
