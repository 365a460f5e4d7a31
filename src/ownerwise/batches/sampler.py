"""Samplers, which draw each record, or each owner, independently at the owner's sampling rate.

Method. Records are grouped once into octaves, in which the sampling rates differ by less than a
factor of two. In an octave whose largest rate is p, candidates are found by skipping: the gap to
the next one is geometric, floor(E / -log(1-p)) with E standard exponential (Devroye, "Non-Uniform
Random Variate Generation", 1986, section X.2). A candidate with rate q is kept with probability q/p
(thinning), which is 1 if the octave has a single rate. In each rate class, this is equivalent to
drawing a binomial count and then a uniform subset of that size. For each record in the expected
batch, a step draws about two numbers if each octave has a single rate, and at most about four
otherwise, plus a few numbers per octave.

Exactness. The 64-bit uniforms from which E is computed resolve both tails of its distribution,
quotients are floored exactly, and thinning compares 53-bit uniforms with q/p, which is at least
1/2. The only remaining error comes from float64 rounding: the probability of drawing a record k
places after the last candidate has a relative error of at most about k 2^-52, which is 1e-12 at a
rate of 1% and 2e-9 for tiny rates among 10^7 records. Rates below 1e-17 approach the 2^-64
resolution of the uniforms.
"""

from __future__ import annotations

import math

import numpy as np

from ownerwise.errors import OwnerwiseError
from ownerwise.randomness import StepStream


class PoissonSampler:
    """Draws record numbers independently, each at its owner's sampling rate.

    Args:
        sampling_rates: one rate per owner, in [0, 1].
        record_owner_index: for each record, the index of its owner in `sampling_rates`.
    """

    def __init__(self, sampling_rates: np.ndarray, record_owner_index: np.ndarray) -> None:
        self.sampling_rates = rates = np.asarray(sampling_rates, dtype=np.float64)
        self.record_owner_index = np.asarray(record_owner_index)
        wrong = rates[~((rates >= 0) & (rates <= 1))]
        if len(wrong):
            raise OwnerwiseError(f"sampling rates must be in [0, 1], got {wrong[:5]}")
        if np.any(self.record_owner_index < 0):
            raise OwnerwiseError(
                "record_owner_index has negative entries: every record needs an owner"
            )
        self._octaves = _octaves(rates, self.record_owner_index)

    def draw(self, stream: StepStream) -> np.ndarray:
        """Return the records of one step in ascending order, int64 [batch]."""
        drawn = [np.empty(0, dtype=np.int64)]
        for members, ceiling in self._octaves:
            candidates = members[_skip(stream, len(members), ceiling)]
            keep = self.sampling_rates[self.record_owner_index[candidates]] / ceiling
            drawn.append(candidates[stream.uniforms(len(candidates)) < keep])
        return np.sort(np.concatenate(drawn))


class OwnerSampler:
    """Draws whole owners independently, each at its sampling rate, and some records of each.

    Which of an owner's records are taken is a secret random choice, made anew in every step, that
    depends on no other owner.

    Args:
        sampling_rates: one rate per owner, in [0, 1].
        record_owner_index: for each record, the index of its owner in `sampling_rates`.
        records_per_owner: the largest number of records taken of an owner; None takes all.
    """

    def __init__(
        self,
        sampling_rates: np.ndarray,
        record_owner_index: np.ndarray,
        records_per_owner: int | None,
    ) -> None:
        self.record_owner_index = np.asarray(record_owner_index)
        self._owners = PoissonSampler(sampling_rates, np.arange(len(sampling_rates)))
        self._most = records_per_owner
        self._records = np.argsort(self.record_owner_index, kind="stable")  # owner by owner
        counts = np.bincount(self.record_owner_index, minlength=len(sampling_rates))
        self._ends = np.cumsum(counts)
        self._counts = counts

    def draw(self, stream: StepStream) -> np.ndarray:
        """Return the records of one step, int64 [batch]: owner by owner, ascending within each."""
        owners = self._owners.draw(stream)
        counts = self._counts[owners]
        element = np.repeat(np.arange(len(owners)), counts)
        first = np.repeat(self._ends[owners] - np.cumsum(counts), counts)
        records = self._records[first + np.arange(len(element))]
        if self._most is not None and len(counts) and counts.max() > self._most:
            order = np.lexsort((stream.words(len(element)), element))  # random within each owner
            rank = np.arange(len(element)) - np.repeat(np.cumsum(counts) - counts, counts)
            records = records[np.sort(order[rank < self._most])]
        return records.astype(np.int64)


def _octaves(rates: np.ndarray, owner: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """Return (records, largest rate) per octave of positive rates that share a binary exponent."""
    exponents, octave = np.unique(np.frexp(rates)[1], return_inverse=True)
    octave = np.where(rates > 0, octave, len(exponents)).astype(np.int16)  # rate 0 comes last
    record_octave = octave[owner]
    order = np.argsort(record_octave, kind="stable")  # a radix sort for 16-bit keys
    if len(order) < 2**31:
        order = order.astype(np.int32)
    ends = np.cumsum(np.bincount(record_octave, minlength=len(exponents) + 1))
    parts = np.split(order, ends[:-1])[: len(exponents)]
    return [
        (members, float(rates[octave == number].max()))
        for number, members in enumerate(parts)
        if len(members)
    ]


def _skip(stream: StepStream, size: int, rate: float) -> np.ndarray:
    """Return positions in range(size), each drawn independently with probability `rate`."""
    scale = math.inf if rate == 1 else -math.log1p(-rate)
    mean = size * rate
    block = int(mean + 6 * math.sqrt(mean)) + 8  # nearly always enough
    last, parts = -1, []
    while last < size:
        # past the last record, the gap does not matter but must not overflow
        capped = np.minimum(_exponentials(stream, block), (size + 1) * scale)
        positions = last + np.cumsum((capped // scale).astype(np.int64) + 1)
        parts.append(positions[: np.searchsorted(positions, size)])
        last = int(positions[-1])
    return np.concatenate(parts)


def _exponentials(stream: StepStream, count: int) -> np.ndarray:
    """Return standard exponential variates from 64-bit uniforms by inversion, float64 [count].

    One bit chooses a half of [0, 1], and 63 bits give the distance x in (0, 1/2] from the outer end
    of that half, so neither small values (tiny rates) nor large ones (the tail) fall on a coarse
    grid.
    """
    words = stream.words(count)
    distance = ((words >> np.uint64(1)) + 0.5) * 2.0**-64
    return -np.where(words & np.uint64(1), np.log(distance), np.log1p(-distance))
