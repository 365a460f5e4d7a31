"""Features of small patches: image features without training, and therefore without privacy cost.

An image is compared, at every place, with a dictionary of patches of 6x6 pixels. Each response,
positive or negative, is reduced by a threshold and averaged over the nine parts of the image. The
square roots of these averages, averaged again over the image and its mirror image, are decorrelated
(across responses, then across parts) and scaled to a Euclidean norm of 1.

The dictionary and the decorrelation are computed from synthetic pictures (`leaves`), which depend
only on a seed. Nothing is fitted to the images, so the features of a record depend only on that
record. Decorrelation matters for private training: gradient descent then needs few steps, and
noise is not amplified in directions in which the features hardly vary.

References:
    Coates, Ng, Lee (2011), "An Analysis of Single-Layer Networks in Unsupervised Feature Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.errors import OwnerwiseError
from ownerwise.models.images import check_pixels, check_shape
from ownerwise.models.leaves import small_images

SIDE = 32
"""Height and width, in pixels, to which images are resized."""

_PATCH, _PARTS = 6, 3
_THRESHOLD = 0.25
_LEAST_CONTRAST = 10 / 255  # added to the variance of a patch, so that noise is not amplified
_EPSILON = 0.1  # added to the variances when patches or parts are decorrelated
_CHANNEL_EPSILON = 0.03  # the same for channels
_SMALL_IMAGES, _PATCHES_EACH, _ROUNDS = 5000, 10, 10
_SEED = 1
_BATCH = 4  # images at a time: their responses stay in the processor's cache


@dataclass(frozen=True, eq=False)
class _Constants:
    """What is computed from synthetic pictures.

    Attributes:
        kernels: the dictionary, [filters, 3, 6, 6].
        mean: mean of the square roots of the channels, [2 filters].
        channels: directions in which the channels vary most, each divided by its deviation, so that
            the results are uncorrelated, [2 filters, components].
        centre: mean of the results in each part, [9, components].
        parts: matrix that makes the nine parts uncorrelated, [9, 9].
    """

    kernels: Tensor
    mean: Tensor
    channels: Tensor
    centre: Tensor
    parts: Tensor


class Patches(nn.Module):
    """Responses to a dictionary of patches, a fixed function of each image.

    Images of shape [batch, 3, height, width], with pixels in [0, 1], become features of shape
    [batch, 9 * components]; images of another size are resized to 32x32 pixels. The module has no
    parameters. Its constants are computed when it is first used, which takes a minute.

    Args:
        filters: number of patches in the dictionary.
        components: number of channels kept for each of the nine parts of the image.
        pictures: number of synthetic pictures from which the constants are computed.
        mirrored: whether an image and its mirror image have the same features, which helps where
            left and right mean the same, as in photographs.
    """

    def __init__(
        self,
        filters: int = 384,
        components: int = 200,
        pictures: int = 40,
        mirrored: bool = True,
    ) -> None:
        super().__init__()
        problems = []
        for what, value, most in (
            ("filters", filters, None),
            ("components", components, 2 * filters if isinstance(filters, int) else None),
            ("pictures", pictures, None),
        ):
            if not isinstance(value, int) or value < 1 or (most is not None and value > most):
                limit = "" if most is None else f" and at most 2 * filters = {most}"
                problems.append(f"{what} {value!r}: expected a whole number of at least 1{limit}")
        if not isinstance(mirrored, bool):
            problems.append(f"mirrored {mirrored!r}: expected True or False")
        if problems:
            raise OwnerwiseError(problems)
        self.filters, self.components, self.pictures = filters, components, pictures
        self.mirrored = mirrored

    @property
    def fingerprint(self) -> str:
        """Everything that determines the features of an image, as text."""
        return f"Patches 2, {self.extra_repr()}"

    def check(self, images: Tensor) -> None:
        """Raise an error unless all pixels are in [0, 1]; `extract` checks all images at once."""
        check_pixels(images)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the features, float [batch, 9 * components]."""
        check_shape(images)
        if images.shape[2:] != (SIDE, SIDE):
            images = functional.interpolate(
                images, [SIDE] * 2, mode="bicubic", align_corners=False, antialias=True
            ).clamp(0, 1)
        if not len(images):
            return images.new_zeros(0, _PARTS**2 * self.components)
        constants = _constants(self.filters, self.components, self.pictures, self.mirrored)
        kernels, mean, channels, centre, parts = (
            tensor.to(images) for tensor in vars(constants).values()
        )
        mixed = [
            (_roots(some, kernels, self.mirrored) - mean) @ channels - centre
            for some in images.split(_BATCH)
        ]
        return functional.normalize((parts @ torch.cat(mixed)).flatten(1))

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return (
            f"filters={self.filters}, components={self.components}, pictures={self.pictures}, "
            f"mirrored={self.mirrored}"
        )


@torch.no_grad()
def _roots(images: Tensor, kernels: Tensor, mirrored: bool) -> Tensor:
    """Return the square roots of the averaged responses, [batch, 9, 2 * filters]."""
    if mirrored:
        return (_roots(images, kernels, False) + _roots(images.flip(3), kernels, False)) / 2
    box = images.new_full((1, *kernels.shape[1:]), 1 / kernels[0].numel())
    mean = functional.conv2d(images, box)
    square = functional.conv2d(images.square(), box)
    deviation = (square - mean.square()).clamp_min_(0).add_(_LEAST_CONTRAST**2).sqrt_()
    responses = functional.conv2d(images, kernels).div_(deviation)
    signs = (responses - _THRESHOLD).relu_(), (-responses - _THRESHOLD).relu_()
    averages = [functional.adaptive_avg_pool2d(sign, _PARTS) for sign in signs]
    return torch.cat(averages, dim=1).flatten(2).transpose(1, 2).sqrt()


@lru_cache(maxsize=4)
def _constants(filters: int, components: int, pictures: int, mirrored: bool) -> _Constants:
    images = small_images(pictures, _SMALL_IMAGES, SIDE, _SEED)
    kernels = _dictionary(images, filters)
    roots = torch.cat([_roots(some, kernels, mirrored) for some in images.split(_BATCH)])
    mean = roots.mean(dim=(0, 1))
    variances, directions = _principal((roots - mean).flatten(0, 1))
    scales = _inverse_deviations(variances, _CHANNEL_EPSILON)
    channels = (directions * scales)[:, :components].float()
    results = (roots - mean) @ channels
    centre = results.mean(dim=0)
    variances, directions = _principal((results - centre).transpose(1, 2).flatten(0, 1))
    parts = (directions * _inverse_deviations(variances, _EPSILON)).T.float()
    return _Constants(kernels, mean, channels, centre, parts)


def _inverse_deviations(variances: Tensor, epsilon: float) -> Tensor:
    return (variances.clamp_min(0) + epsilon * variances.mean()).rsqrt()


def _dictionary(images: Tensor, filters: int) -> Tensor:
    """Return kernels that respond to typical patches: spherical k-means of decorrelated patches."""
    generator = torch.Generator().manual_seed(_SEED)
    places = torch.randint(SIDE - _PATCH + 1, (len(images), _PATCHES_EACH, 2), generator=generator)
    patches = torch.stack(
        [
            image[:, top : top + _PATCH, left : left + _PATCH].flatten()
            for image, spots in zip(images, places.tolist(), strict=True)
            for top, left in spots
        ]
    ).double()
    patches -= patches.mean(dim=1, keepdim=True)
    patches /= (patches.var(dim=1, keepdim=True) + _LEAST_CONTRAST**2).sqrt()
    variances, directions = _principal(patches)
    decorrelate = (directions * (variances.clamp_min(0) + _EPSILON).rsqrt()) @ directions.T
    patches = patches @ decorrelate
    units = functional.normalize(patches)
    chosen = torch.randperm(len(units), generator=generator)[:filters]
    entries = units[chosen]
    for _ in range(_ROUNDS):
        similarity, nearest = (units @ entries.T).max(dim=1)
        sums = torch.zeros_like(entries).index_add_(0, nearest, patches * similarity[:, None])
        norms = sums.norm(dim=1, keepdim=True)
        entries = torch.where(norms > 0, sums / norms.clamp_min(1e-12), entries)
    kernels = entries @ decorrelate
    kernels -= kernels.mean(dim=1, keepdim=True)
    return kernels.float().reshape(filters, 3, _PATCH, _PATCH)


def _principal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances and directions, float64, from the largest; the signs are well defined."""
    covariance = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(4096):
        covariance += (part.T @ part).double()
    variances, directions = torch.linalg.eigh(covariance / len(rows))
    variances, directions = variances.flip(0), directions.flip(1)
    largest = directions.abs().argmax(dim=0)
    return variances, directions * directions[largest, torch.arange(len(largest))].sign()
