"""Noised sums, with Gaussian or Laplace noise drawn from the secret stream once per logical step.

Guarantee. `Noise.gaussian` adds independent N(0, std^2) noise to sums, and `Noise.laplace` adds
Laplace noise. The standard deviation, the scale and the grid are public constants, from which the
accountant derives the privacy guarantee.

Arithmetic (docs/proofs/arithmetic.md). Adding floating-point noise to a floating-point sum can
reveal a record through the low-order bits: where the result is small, the grid of the larger
summand remains visible (Mironov, "On Significance of the Least Significant Bits for Differential
Privacy", CCS 2012). The sum and the noise are therefore both rounded to the same public grid and
added exactly. The grid spacing is a power of two, about 2^20 times smaller than the noise. For v on
the grid, v + round(N) = round(v + N): the result is a function of the Gaussian mechanism's output
at v, and so is everything computed from it, including the conversion to another precision. Rounding
adds at most grid * sqrt(numbers) to the distance between two sums. `grid_of` keeps this
increase below a tolerance, which the caller must allow for in the sensitivity.

Normal variates are computed by the Box-Muller method (1958), in float64. The radius is computed
from a 63-bit uniform variate that keeps its relative precision near 0 and is never 0, so the tails
are correct up to 9.4 standard deviations (a normal variate exceeds this with probability below
1e-20). Laplace variates are determinants of 2-by-2 matrices of normal variates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ownerwise.randomness.stream import SPARE, SecretStream, StepStream
from ownerwise.torch_internals import flatten_dense_tensors, unflatten_dense_tensors

__all__ = ["Noise", "grid_of", "standard_laplace", "standard_normal"]

_BLOCK = 2**18  # numbers noised together: few for the cache, many for the threads of torch
_FEW = 2**15  # up to this many numbers are joined, and drawn for several steps at once
_LAPLACE_BLOCK = 2**16  # Laplace variates drawn together
_AHEAD = 64  # largest number of steps drawn together, if each needs few numbers
_HALF_STEP = torch.tensor(2.0**-64, dtype=torch.float64)
_COARSEST, FINEST_GRID = 2.0**-20, 2.0**-40
"""Spacing of the coarsest and of the finest grid, in units of the noise."""


def grid_of(std: float, numbers: int = 1, tolerance: float = math.inf) -> float:
    """Return the grid spacing, a power of two, for noise of this size.

    Args:
        std: standard deviation, or scale, of the noise.
        numbers: how many numbers are released.
        tolerance: upper bound on grid * sqrt(numbers), the most that rounding can add to the
            distance between two neighbouring sums.
    """
    _check_scale("std", std)
    wanted = min(std * _COARSEST, tolerance / math.sqrt(max(1, numbers)))
    if not wanted >= std * FINEST_GRID:
        raise ValueError(
            f"{numbers} numbers with noise {std:g} cannot be rounded to within {tolerance:g}: "
            "the grid would be too fine for float64. Use a larger clip norm, or less noise"
        )
    return 2.0 ** math.floor(math.log2(wanted))


class Noise:
    """The noise that a run uses for one purpose: one draw per step, never repeated.

    Args:
        stream: the run's stream; by default a new private stream.
        purpose: which child of the stream to use. Two mechanisms in one step (gradient, histogram)
            need different purposes.

    Example:
        >>> noise = Noise()
        >>> (released,) = noise.gaussian(0, [torch.zeros(3)], 2.0, grid_of(2.0))
        >>> bool((released / grid_of(2.0) == (released / grid_of(2.0)).round()).all())
        True
    """

    def __init__(self, stream: SecretStream | None = None, *, purpose: str = "noise") -> None:
        self._stream = (SecretStream() if stream is None else stream).child(purpose)
        self._ahead: dict[int, _Ahead] = {}  # noise drawn ahead, by step

    @property
    def private(self) -> bool:
        """False if the stream has a fixed seed: whoever knows the seed can subtract the noise."""
        return self._stream.private

    def gaussian(
        self,
        step: int,
        sums: Sequence[Tensor],
        std: float,
        grid: float,
        factor: float = 1.0,
        like: Sequence[Tensor] | None = None,
        overwrite: bool = False,
    ) -> list[Tensor]:
        """Return `sums` plus N(0, std^2) noise, rounded to the grid, times `factor`.

        The results have the shapes, dtypes and devices of the tensors in `like`, by default those
        of `sums`.

        Args:
            overwrite: whether the results may take the memory of `sums`.
        """
        _check_scale("std", std)
        self._stream.check_process()  # noise drawn ahead must not be used twice
        noised = _Noised(sums, grid, factor, like, overwrite)
        size, spread = noised.size, std / grid
        if step in self._ahead or size <= _FEW:
            noised.add(0, self._made_ahead(step, size, spread))
            return noised.results()
        stream = self._open(step)
        words = np.empty(8 * _BLOCK + SPARE, dtype=np.uint8)
        memory = torch.empty(3, _BLOCK // 2, dtype=torch.float64)
        for start in range(0, size, _BLOCK):
            count = min(_BLOCK, size - start)
            normals = _box_muller(stream.words(count + count % 2, words), memory)[:count]
            noised.add(start, normals.mul_(spread).round_(), memory.view(-1))
        return noised.results()

    def laplace(
        self, step: int, sums: Sequence[Tensor], scale: float, grid: float, factor: float = 1.0
    ) -> list[Tensor]:
        """Return `sums` plus Laplace(0, scale) noise (with std sqrt(2) * scale); see `gaussian`."""
        _check_scale("scale", scale)
        stream = self._open(step)
        spread = scale / grid
        noised = _Noised(sums, grid, factor)
        for start in range(0, noised.size, _LAPLACE_BLOCK):
            count = min(_LAPLACE_BLOCK, noised.size - start)
            noised.add(start, standard_laplace(stream, count).mul_(spread).round_())
        return noised.results()

    def _open(self, step: int) -> StepStream:
        stream = self._stream.at_step(step)
        self._ahead.clear()
        return stream

    def _made_ahead(self, step: int, size: int, spread: float) -> Tensor:
        """Return a step's noise in units of the grid, drawn together with the noise of later steps.

        The numbers are the same as if the step's noise were drawn alone, because each step has its
        own part of the key stream. If more numbers are requested than were drawn in advance, the
        rest are drawn from the same part of the key stream.
        """
        if step not in self._ahead:
            count = max(1, min(_AHEAD, 2 * _FEW // max(1, size)))
            length = size + size % 2
            streams = [self._open(at) for at in range(step, step + count)]
            words = np.concatenate([stream.words(length) for stream in streams])
            normals = _box_muller(words).view(count, length)
            units = (normals * spread).round_()
            self._ahead = {
                step + row: _Ahead(streams[row], normals[row], spread, units[row])
                for row in range(count)
            }
        for earlier in [at for at in self._ahead if at < step]:
            del self._ahead[earlier]
        return self._ahead.pop(step).take(size, spread)

    def __repr__(self) -> str:
        return f"Noise({self._stream!r})"


@dataclass(frozen=True)
class _Ahead:
    """Normal variates drawn in advance for one step, and the noise computed from them.

    The noise is recomputed from the variates if a different spread or more numbers are requested.
    """

    stream: StepStream
    normals: Tensor
    spread: float
    units: Tensor

    def take(self, size: int, spread: float) -> Tensor:
        if size <= len(self.units) and spread == self.spread:
            return self.units[:size]
        normals = self.normals[:size]
        if size > len(normals):
            rest = standard_normal(self.stream, size - len(normals))
            normals = torch.cat([normals, rest])
        return (normals * spread).round_()


def standard_normal(stream: StepStream, size: int) -> Tensor:
    """Return independent N(0, 1) numbers, float64 [size]."""
    return _box_muller(stream.words(size + size % 2))[:size]


def standard_laplace(stream: StepStream, size: int) -> Tensor:
    """Return independent Laplace(0, 1) numbers, float64 [size].

    Each number is a b - c d for independent standard normal variates a, b, c and d.
    """
    a, b, c, d = standard_normal(stream, 4 * size).view(4, size)
    return a * b - c * d


def _box_muller(words: np.ndarray, memory: Tensor | None = None) -> Tensor:
    """Return one normal variate per word, in its place; each pair of words gives a pair of them.

    Args:
        words: uniform 64-bit words, an even number of them.
        memory: memory for three numbers per pair, float64 [3, at least the pairs].
    """
    pairs = torch.from_numpy(words.view("<i8")).view(-1, 2)
    if memory is None:
        memory = torch.empty(3, len(pairs), dtype=torch.float64)
    radius, angle, other = memory[:, : len(pairs)]
    # u = (k + 1/2) 2^-63 in (0, 1], k has 63 bits: the conversion rounds k to 53 significant bits
    radius.copy_(torch.bitwise_and(pairs[:, 0], 2**63 - 1, out=other.view(torch.int64)))
    torch.add(_HALF_STEP, radius, alpha=2.0**-63, out=radius)
    radius.log_().mul_(-2).sqrt_()
    angle.copy_(pairs[:, 1]).mul_(math.pi * 2.0**-63)  # uniform on [-pi, pi]
    normals = pairs.view(torch.float64)
    torch.mul(torch.cos(angle, out=other), radius, out=normals[:, 0])
    torch.mul(angle.sin_(), radius, out=normals[:, 1])
    return normals.view(-1)


class _Noised:
    """Sums to which noise is added part by part: (rounded sums + noise) * grid * factor.

    Every operation is exact or correctly rounded. Scaling by a power of two is exact. Rounding to
    whole units is exact in float64: a number beyond 2^53 units is already whole. The sum of two
    whole numbers of units is exact up to 2^53; beyond that, the rounded result depends only on the
    exact sum.

    Args:
        sums: the sums, whose numbers are counted one tensor after another.
        grid, factor, like, overwrite: as for `Noise.gaussian`.

    Attributes:
        size: how many numbers there are.
    """

    def __init__(
        self,
        sums: Sequence[Tensor],
        grid: float,
        factor: float,
        like: Sequence[Tensor] | None = None,
        overwrite: bool = False,
    ) -> None:
        like = sums if like is None else like
        self._like = like
        self._grid, self._factor = grid, factor
        self.size = sum(tensor.numel() for tensor in sums)
        self._joined = 0 < self.size <= _FEW  # saves many short calls
        if self._joined:
            self._sums = [_joined(sums)]
            dtypes = {tensor.dtype for tensor in like}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
            self._noised = [torch.empty_like(self._sums[0], dtype=dtype)]
            self._bounds = [0, self.size]
            return
        self._sums = [tensor.detach().reshape(-1) for tensor in sums]
        self._noised = []
        for flat, own, part in zip(self._sums, _own_memory(self._sums), like, strict=True):
            reused = overwrite and own and flat.dtype == part.dtype
            self._noised.append(flat if reused else torch.empty_like(flat, dtype=part.dtype))
        self._bounds = list(accumulate(map(len, self._sums), initial=0))

    def add(self, start: int, units: Tensor, memory: Tensor | None = None) -> None:
        """Add noise to the numbers from `start` on.

        Args:
            start: the number of the first of them.
            units: the noise in units of the grid, float64; overwritten.
            memory: memory for as many numbers, on the CPU.
        """
        number = bisect_right(self._bounds, start) - 1
        while len(units):
            first, end = self._bounds[number : number + 2]
            here = slice(start - first, min(end - first, start - first + len(units)))
            total, out = self._sums[number][here], self._noised[number][here]
            noise, units = units[: len(out)].to(out.device), units[len(out) :]
            if memory is None or memory.device != noise.device:
                rounded = torch.empty_like(noise)
            else:
                rounded = memory[: len(noise)]
            noise.add_(rounded.copy_(total).mul_(1.0 / self._grid).round_())
            out.copy_(noise.mul_(self._grid * self._factor))
            start, number = end, number + 1

    def results(self) -> list[Tensor]:
        """Return the noised sums, in the shapes, dtypes and devices of `like`."""
        noised: Sequence[Tensor] = self._noised
        if self._joined:
            kinds = {(tensor.device, tensor.dtype) for tensor in self._like}
            if len(kinds) == 1:  # one conversion for all
                return list(unflatten_dense_tensors(noised[0].to(*kinds.pop()), self._like))
            noised = unflatten_dense_tensors(noised[0], self._like)
        pairs = zip(noised, self._like, strict=True)
        return [part.view(t.shape).to(t.device, t.dtype) for part, t in pairs]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers, one tensor after another."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    with torch.no_grad():
        return flatten_dense_tensors(tensors)


def _own_memory(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each flat tensor whether it fills its memory, which no other of them uses."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    users = Counter(storage.data_ptr() for storage in storages)
    pairs = zip(tensors, storages, strict=True)
    return [s.nbytes() == t.nbytes and users[s.data_ptr()] == 1 for t, s in pairs]


def _check_scale(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"the {name} of the noise must be positive and finite, got {value}")
