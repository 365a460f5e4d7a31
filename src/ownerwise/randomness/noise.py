"""Gaussian and Laplace noise from the secret stream, one draw per logical step.

Guarantee. `Noise.gaussian` returns independent N(0, std^2) numbers, computed in float64 and cast at
the end; `Noise.laplace` returns independent Laplace numbers of the given scale. The scale is a
public constant of the plan. The accountant determines how much privacy the noise provides.

Gaussians come from the Box-Muller transform (1958). The radius uses a 63-bit uniform that keeps its
relative precision near 0 and is never 0, so the tails are accurate up to 9.4 standard deviations
(which a normal exceeds with probability below 1e-20).

Known limit: floating point. The samples are float64 numbers, not reals, and the set of doubles that
a sampler can return may reveal the value to which noise was added. Mironov, "On Significance of the
Least Significant Bits for Differential Privacy" (CCS 2012) breaks textbook Laplace noise this way;
Holohan & Braghin, "Secure Random Sampling in Differential Privacy" (ESORICS 2021,
arXiv:2107.10138) and Jin et al. (arXiv:2112.05307) do it for Gaussian samplers such as Box-Muller.
The countermeasure of Holohan & Braghin is `draws=k`: the sum of k independent samples divided by
sqrt(k), for which the search for a pre-image grows to about 2^(53 (k-1)). They and Opacus use
k = 4; it takes k times as long and is off by default. Laplace noise is always built from four
normals (the determinant of a 2 by 2 matrix of normals is Laplace), as the same paper proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ownerwise.randomness.stream import SecretStream, StepStream

_BLOCK = 2**16  # normals computed at once, so that the transform stays in cache
_AHEAD = 64  # most steps computed at once if a step needs few numbers


class Noise:
    """The noise for one purpose of a run: one draw per step, never repeated.

    Args:
        stream: the run's stream; a private one if not given.
        purpose: the child of the stream to use. Two mechanisms of one step (gradient, histogram)
            need two purposes.
        draws: independent samples summed into each value; 4 protects against floating-point
            attacks.

    Example:
        >>> sums = [torch.zeros(3), torch.zeros(2, 2)]
        >>> first, second = Noise().gaussian(0, 1.5, sums)
        >>> second.shape
        torch.Size([2, 2])
    """

    def __init__(
        self, stream: SecretStream | None = None, *, purpose: str = "noise", draws: int = 1
    ) -> None:
        if draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        self._stream = (SecretStream() if stream is None else stream).child(purpose)
        self._draws = draws
        self._ahead: dict[int, _StepNoise] = {}  # of steps already computed

    @property
    def private(self) -> bool:
        """False if the stream has a fixed seed: whoever knows it can subtract the noise."""
        return self._stream.private

    def gaussian(self, step: int, std: float, like: Sequence[Tensor]) -> list[Tensor]:
        """Return N(0, std^2) noise with the shapes, dtypes and devices of `like`."""
        _check_scale("std", std)
        self._stream.check_process()  # noise computed ahead must not be used twice
        size = sum(tensor.numel() for tensor in like)
        if self._draws == 1 and (step in self._ahead or 2 * size <= _BLOCK):
            return _split(self._computed_ahead(step, size, std, _common_dtype(like)), like)
        stream = self._open(step)
        return _fill(like, std, lambda count: standard_normal(stream, count, draws=self._draws))

    def laplace(self, step: int, scale: float, like: Sequence[Tensor]) -> list[Tensor]:
        """Return Laplace(0, scale) noise (std = sqrt(2) scale) with the shapes of `like`."""
        _check_scale("scale", scale)
        stream = self._open(step)
        return _fill(like, scale, lambda size: standard_laplace(stream, size, draws=self._draws))

    def _open(self, step: int) -> StepStream:
        stream = self._stream.at_step(step)
        self._ahead.clear()
        return stream

    def _computed_ahead(self, step: int, size: int, std: float, dtype: torch.dtype) -> Tensor:
        """Return the noise of a step, computed together with that of the following steps.

        The numbers are the same as for the step alone: each step has its own part of the key
        stream, and if a step needs more numbers than were computed, the rest is drawn from there.
        """
        if step not in self._ahead:
            count = max(1, min(_AHEAD, _BLOCK // max(1, size)))
            length = size + size % 2
            streams = [self._open(at) for at in range(step, step + count)]
            words = np.concatenate([stream.words(length) for stream in streams])
            normals = _box_muller(words).view(count, length)
            noise = (normals * std).to(dtype)
            self._ahead = {
                step + row: _StepNoise(streams[row], normals[row], std, noise[row])
                for row in range(count)
            }
        for earlier in [at for at in self._ahead if at < step]:
            del self._ahead[earlier]
        return self._ahead.pop(step).take(size, std, dtype)

    def __repr__(self) -> str:
        return f"Noise({self._stream!r}, draws={self._draws})"


@dataclass(frozen=True)
class _StepNoise:
    """What was computed ahead for a step: its normals, and the noise in its likely form."""

    stream: StepStream
    normals: Tensor
    std: float
    noise: Tensor

    def take(self, size: int, std: float, dtype: torch.dtype) -> Tensor:
        if size <= len(self.noise) and std == self.std and dtype == self.noise.dtype:
            return self.noise[:size].clone()  # a view would hold the noise of later steps
        normals = self.normals[:size]
        if size > len(normals):
            rest = standard_normal(self.stream, size - len(normals))
            normals = torch.cat([normals, rest])
        return (normals * std).to(dtype)


def standard_normal(stream: StepStream, size: int, *, draws: int = 1) -> Tensor:
    """Return N(0, 1), float64 [size], each the sum of `draws` samples over sqrt(draws)."""
    total = _box_muller(stream.words(size + size % 2))
    for _ in range(draws - 1):
        total += _box_muller(stream.words(size + size % 2))
    return (total if draws == 1 else total.mul_(draws**-0.5))[:size]


def standard_laplace(stream: StepStream, size: int, *, draws: int = 1) -> Tensor:
    """Return Laplace(0, 1) (variance 2), float64 [size], as a b - c d of normals."""
    a, b, c, d = standard_normal(stream, 4 * size, draws=draws).view(4, size)
    return a * b - c * d


def _box_muller(words: np.ndarray) -> Tensor:
    """Return as many normals as words; each pair of words gives a pair of normals."""
    pairs = torch.from_numpy(words.view("<i8")).view(-1, 2)
    # u = (k + 1/2) 2^-63 in (0, 1], k of 63 bits: the conversion rounds k to 53 significant bits
    radius = (pairs[:, 0] & (2**63 - 1)).double().add_(0.5).mul_(2.0**-63)
    radius = radius.log_().mul_(-2).sqrt_()
    angle = pairs[:, 1].double().mul_(math.pi * 2.0**-63)  # uniform on [-pi, pi]
    normals = torch.empty(len(pairs), 2, dtype=torch.float64)
    torch.mul(angle.cos(), radius, out=normals[:, 0])
    torch.mul(angle.sin_(), radius, out=normals[:, 1])
    return normals.view(-1)


def _fill(like: Sequence[Tensor], scale: float, sample: Callable[[int], Tensor]) -> list[Tensor]:
    """Return noise for all of `like`, computed block by block, scaled, then cast."""
    flat = torch.empty(sum(tensor.numel() for tensor in like), dtype=_common_dtype(like))
    for block in flat.split(_BLOCK) if len(flat) else ():
        block.copy_(sample(len(block)).mul_(scale))
    return _split(flat, like)


def _common_dtype(like: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if torch.float64 in {t.dtype for t in like} else torch.float32


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat vector in the shapes of `like`; copies on other devices or dtypes."""
    shaped = _unflatten_dense_tensors(flat, like)
    if {(t.dtype, t.device) for t in like} <= {(flat.dtype, flat.device)}:
        return list(shaped)
    return [part.to(t.device, t.dtype) for part, t in zip(shaped, like, strict=True)]


def _check_scale(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"the noise's {name} must be positive and finite, got {value}")
