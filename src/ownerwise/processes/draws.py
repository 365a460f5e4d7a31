"""Random numbers that are drawn for a whole batch, of which a process uses those of its share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ownerwise.errors import OwnerwiseError


class Draws(Protocol):
    """A source of random numbers."""

    def words(self, count: int) -> np.ndarray:
        """Return uniform 64-bit words."""
        ...

    def uniforms(self, count: int) -> np.ndarray:
        """Return uniform numbers in [0, 1)."""
        ...

    def integers(self, high: int, count: int) -> np.ndarray:
        """Return uniform integers below `high`."""
        ...


class DrawsOfShare:
    """A step's random numbers for a clipping rule, the same for each element in any process.

    Args:
        stream: the step's random numbers, the same in all processes.
        own: positions of this process's elements in the whole batch.
        elements: number of elements in the whole batch.
    """

    def __init__(self, stream: Draws, own: np.ndarray, elements: int):
        self._stream = stream
        self._own = own
        self._elements = elements
        self._drawn: dict[tuple[int, str, int], np.ndarray] = {}

    def of(self, elements: slice) -> OwnDraws:
        """Return the random numbers of some of this process's elements."""
        return OwnDraws(self, self._own[elements])

    def drawn(self, call: tuple[int, str, int], draw: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return what a call draws for the whole batch, [elements, numbers of each]."""
        if call not in self._drawn:
            self._drawn[call] = draw(self._elements * call[2]).reshape(self._elements, call[2])
        return self._drawn[call]

    @property
    def stream(self) -> Draws:
        """The step's random numbers."""
        return self._stream


class OwnDraws:
    """The random numbers of some elements; see `DrawsOfShare`."""

    def __init__(self, share: DrawsOfShare, positions: np.ndarray):
        self._share = share
        self._positions = positions
        self._calls = 0

    def words(self, count: int) -> np.ndarray:
        """Return uniform 64-bit words, uint64 [count]."""
        return self._taken("words", count, self._share.stream.words)

    def uniforms(self, count: int) -> np.ndarray:
        """Return multiples of 2^-53, uniform on [0, 1), float64 [count]."""
        return self._taken("uniforms", count, self._share.stream.uniforms)

    def integers(self, high: int, count: int) -> np.ndarray:
        """Return integers in {0, ..., high - 1}, int64 [count]."""
        draw = self._share.stream.integers
        return self._taken(f"integers below {high}", count, lambda count: draw(high, count))

    def _taken(self, kind: str, count: int, draw: Callable[[int], np.ndarray]) -> np.ndarray:
        each, rest = divmod(count, max(1, len(self._positions)))
        if rest:
            raise OwnerwiseError(
                "a randomised clipping rule must draw the same number of random numbers for every "
                "record, with each call covering all records: stream.uniforms(len(norms))"
            )
        call = self._calls, kind, each
        self._calls += 1
        return self._share.drawn(call, draw)[self._positions].ravel()
