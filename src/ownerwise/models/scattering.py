"""The scattering transform: image features without training, and therefore without privacy cost.

An image is convolved with wavelets at several scales and angles, and the modulus is taken. Both
operations are repeated once with the coarser wavelets. Each result is smoothed by a Gaussian and
sampled at every 2^J-th pixel. The filters are fixed, so the features of a record depend only on
that record. Small shifts and deformations of an image change its features only slightly.

The wavelets are Morlet wavelets, defined in the Fourier domain: a Gaussian around the centre
frequency, minus a Gaussian around zero that makes the mean vanish. The wavelets are
scaled so that, together with the low-pass filter, they do not increase the energy at any frequency;
distances between images (with their reflected margins) therefore never increase.

References:
    Bruna, Mallat (2013), "Invariant Scattering Convolution Networks"; Tramer, Boneh (2021),
    "Differentially Private Learning Needs Better Features (or Much More Data)".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ownerwise.errors import OwnerwiseError

_ALIASES = range(-3, 4)  # beyond these, the narrowest Gaussian is below 1e-30


class Scattering(nn.Module):
    """Scattering coefficients of orders 0, 1 and 2, which are a fixed function of each image.

    With the defaults, an image channel becomes 81 channels with a quarter of the height and width.

    Args:
        height, width: size of the images; multiples of 2 ** scales.
        scales: number of octaves (J).
        angles: number of directions (L).

    Example:
        >>> Scattering(28, 28)(torch.rand(5, 1, 28, 28)).shape
        torch.Size([5, 81, 7, 7])
    """

    wavelets: Tensor  # [scales, angles, padded height, padded width], Fourier domain, real
    average_rows: Tensor  # [height / stride, padded height]
    average_columns: Tensor  # [width / stride, padded width]

    def __init__(self, height: int, width: int, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        stride = 2**scales
        problems = [
            f"{what} {size}: expected a multiple of 2 ** scales = {stride} that is larger than "
            f"{stride} (the margins are reflected); pad or resize the images, or use fewer scales"
            for what, size in (("height", height), ("width", width))
            if size % stride or size <= stride
        ]
        for what, count in (("scales", scales), ("angles", angles)):
            if count < 1:
                problems.append(f"{what} {count}: expected at least 1")
        if problems:
            raise OwnerwiseError(problems)
        self.height, self.width, self.scales, self.angles = height, width, scales, angles
        self._stride = stride
        padded = height + 2 * stride, width + 2 * stride
        wavelets = torch.stack(
            [
                torch.stack(
                    [_morlet(padded, j, math.pi * a / angles, angles) for a in range(angles)]
                )
                for j in range(scales)
            ]
        )
        rows, columns = (_averages(size, stride) for size in padded)
        wavelets = wavelets * _contraction(wavelets, rows[0], columns[0])
        dtype = torch.get_default_dtype()
        self.register_buffer("wavelets", wavelets.to(dtype))
        self.register_buffer("average_rows", rows[1:-1].to(dtype))  # without the margins
        self.register_buffer("average_columns", columns[1:-1].to(dtype))

    @property
    def channels(self) -> int:
        """Number of output channels for each image channel."""
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.scales * self.angles + pairs * self.angles**2

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return features of shape [batch, image channels * channels, height / 2^J, width / 2^J].

        Channels are ordered by image channel, then by scattering order, scales and angles.
        """
        if images.dim() != 4 or images.shape[2:] != (self.height, self.width):
            raise OwnerwiseError(
                f"the images have shape {list(images.shape)}; expected [batch, channels, "
                f"{self.height}, {self.width}]"
            )
        images = functional.pad(images, [self._stride] * 4, mode="reflect")
        spectrum = torch.fft.fft2(images)[:, :, None]  # [batch, channels, paths, height, width]
        orders = [[self._averaged(images[:, :, None])], [], []]
        for fine in range(self.scales):
            first = _modulus(spectrum * self.wavelets[fine])
            orders[1].append(self._averaged(first))
            if fine + 1 == self.scales:
                break
            first_spectrum = torch.fft.fft2(first)[:, :, :, None]
            for coarse in range(fine + 1, self.scales):
                second = _modulus(first_spectrum * self.wavelets[coarse])
                orders[2].append(self._averaged(second).flatten(2, 3))
        return torch.cat([path for order in orders for path in order], dim=2).flatten(1, 2)

    def _averaged(self, paths: Tensor) -> Tensor:
        return self.average_rows @ paths @ self.average_columns.T

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"{self.height}, {self.width}, scales={self.scales}, angles={self.angles}"


def _modulus(spectrum: Tensor) -> Tensor:
    values = torch.fft.ifft2(spectrum)
    real, imaginary = values.real, values.imag  # four times as fast as abs()
    return (real * real).addcmul_(imaginary, imaginary).sqrt_()


def _morlet(shape: tuple[int, int], scale: int, angle: float, angles: int) -> Tensor:
    """Return the transfer function of one wavelet, float64 [height, width]."""
    std, centre, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / angles
    wave, still = torch.zeros(2, *shape, dtype=torch.float64)
    for row_alias in _ALIASES:
        for column_alias in _ALIASES:
            down = _frequencies(shape[0], row_alias)[:, None]
            right = _frequencies(shape[1], column_alias)[None, :]
            along = math.cos(angle) * right + math.sin(angle) * down
            across = math.cos(angle) * down - math.sin(angle) * right
            wave += _bell(along - centre, across, std, slant)
            still += _bell(along, across, std, slant)
    return wave - wave[0, 0] / still[0, 0] * still


def _frequencies(size: int, alias: int) -> Tensor:
    return 2 * math.pi * (torch.fft.fftfreq(size, dtype=torch.float64) + alias)


def _bell(along: Tensor, across: Tensor, std: float, slant: float) -> Tensor:
    return torch.exp(-0.5 * std**2 * (along.square() + (across / slant).square()))


def _averages(size: int, stride: int) -> Tensor:
    """Return weights of Gaussian averages around every `stride`-th of `size` points on a circle."""
    std = 0.4 * stride
    places = torch.arange(size, dtype=torch.float64)
    distance = places[None, :] - places[::stride, None]
    turns = [torch.exp(-0.5 * ((distance + size * turn) / std).square()) for turn in _ALIASES]
    bells = torch.stack(turns).sum(dim=0)
    return bells / bells.sum(dim=1, keepdim=True)


def _contraction(wavelets: Tensor, row_average: Tensor, column_average: Tensor) -> float:
    """Return the largest factor <= 1 such that the filters, scaled by it, amplify no frequency."""
    low = torch.outer(torch.fft.fft(row_average).real, torch.fft.fft(column_average).real)
    energy = wavelets.square().sum(dim=(0, 1))
    mirrored = energy.flip(0, 1).roll((1, 1), (0, 1))  # real images: frequencies come in pairs
    room = (1 - low.square()) / ((energy + mirrored) / 2)
    room[0, 0] = 1.0  # only the low-pass filter passes the mean
    return min(1.0, math.sqrt(float(room.min())))
