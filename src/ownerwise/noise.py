"""Gaussian and Laplace noise from the secret stream, one draw per logical step.

Guarantee. `Noise.gaussian` returns independent N(0, std^2) numbers, made in float64 and cast at the
end; `Noise.laplace` returns independent Laplace numbers of the given scale. The scale is a public
constant of the plan. What the noise buys is the accountant's affair.

Gaussians come by Box & Muller (1958). The radius takes a 63-bit uniform that keeps its relative
precision near 0 and is never 0, so the tails are right up to 9.4 standard deviations (beyond which
a normal falls with probability below 1e-20).

Known limit: floating point. The samples are float64 numbers, not reals; which doubles a sampler can
return, added to a gradient, may show what was added. Mironov, "On Significance of the Least
Significant Bits for Differential Privacy" (CCS 2012) breaks textbook Laplace noise this way;
Holohan & Braghin, "Secure Random Sampling in Differential Privacy" (ESORICS 2021,
arXiv:2107.10138) and Jin et al. (arXiv:2112.05307) do it for Gaussian samplers such as Box-Muller.
The countermeasure of Holohan & Braghin is `draws=k`: the sum of k independent samples divided by
sqrt(k), for which the search for a pre-image grows to about 2^(53 (k-1)). They and Opacus use
k = 4; it costs k times the time and is off by default. Laplace noise is always made of four normals
(the determinant of a 2 by 2 matrix of normals is Laplace), the form that the same paper proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ownerwise.random import SecretStream, StepStream

__all__ = ["Noise", "standard_laplace", "standard_normal"]

_BLOCK = 2**17  # normals made at once: 1 MiB, so that the passes of the transform stay in cache


class Noise:
    """The noise of one purpose of a run: one draw for each step, and none twice.

    Args:
        stream: the run's stream; a private one if not given.
        purpose: which child of the stream to use. Two mechanisms of one step (gradient, histogram)
            need two purposes.
        draws: independent samples summed into one (4 against the floating-point attack).

    Example:
        noise = Noise(stream)
        for tensor, extra in zip(sums, noise.gaussian(step, std, sums)):
            tensor += extra
    """

    def __init__(
        self, stream: SecretStream | None = None, *, purpose: str = "noise", draws: int = 1
    ) -> None:
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        self._stream = (SecretStream() if stream is None else stream).child(purpose)
        self._draws = draws

    @property
    def private(self) -> bool:
        """False if the stream has a fixed seed: then whoever knows it can subtract the noise."""
        return self._stream.private

    @property
    def next_step(self) -> int:
        """The first step that can still be drawn."""
        return self._stream.next_step

    def gaussian(self, step: int, std: float, like: Sequence[Tensor]) -> list[Tensor]:
        """N(0, std^2) for every number of `like`, in its shapes, dtypes and devices."""
        _check_scale("std", std)
        stream = self._stream.at_step(step)
        return _fill(like, std, lambda size: standard_normal(stream, size, draws=self._draws))

    def laplace(self, step: int, scale: float, like: Sequence[Tensor]) -> list[Tensor]:
        """Laplace(0, scale) (std = sqrt(2) scale) for every number of `like`."""
        _check_scale("scale", scale)
        stream = self._stream.at_step(step)
        return _fill(like, scale, lambda size: standard_laplace(stream, size, draws=self._draws))

    def __repr__(self) -> str:
        return f"Noise({self._stream!r}, draws={self._draws})"


def standard_normal(stream: StepStream, size: int, *, draws: int = 1) -> Tensor:
    """Independent N(0, 1), float64 [size]; each the sum of `draws` samples over sqrt(draws)."""
    total = _box_muller(stream, size)
    for _ in range(draws - 1):
        total += _box_muller(stream, size)
    return total if draws == 1 else total.mul_(draws**-0.5)


def standard_laplace(stream: StepStream, size: int, *, draws: int = 1) -> Tensor:
    """Independent Laplace(0, 1) (variance 2), float64 [size], as a b - c d of normals."""
    a, b, c, d = standard_normal(stream, 4 * size, draws=draws).view(4, size)
    return a * b - c * d


def _box_muller(stream: StepStream, size: int) -> Tensor:
    pairs = -(-size // 2)
    words = torch.from_numpy(stream.words(2 * pairs).view("<i8"))
    # u = (k + 1/2) 2^-63 in (0, 1], k of 63 bits: the conversion rounds k to 53 significant bits
    radius = (words[:pairs] & (2**63 - 1)).double().add_(0.5).mul_(2.0**-63)
    radius = radius.log_().mul_(-2).sqrt_()
    angle = words[pairs:].double().mul_(math.pi * 2.0**-63)  # uniform on [-pi, pi]
    normals = torch.empty(2 * pairs, dtype=torch.float64)
    torch.cos(angle, out=normals[:pairs])
    torch.sin(angle, out=normals[pairs:])
    normals.view(2, pairs).mul_(radius)
    return normals[:size]


def _fill(like: Sequence[Tensor], scale: float, sample: Callable[[int], Tensor]) -> list[Tensor]:
    """One flat vector for all of `like`, made block by block and split; scaled, then cast."""
    sizes = [tensor.numel() for tensor in like]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in like) else torch.float32
    flat = torch.empty(sum(sizes), dtype=dtype)
    for block in flat.split(_BLOCK) if len(flat) else ():
        block.copy_(sample(len(block)).mul_(scale))
    parts = zip(flat.split(sizes), like, strict=True)
    return [part.view(tensor.shape).to(tensor.device, tensor.dtype) for part, tensor in parts]


def _check_scale(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} of the noise must be positive and finite, got {value}")
