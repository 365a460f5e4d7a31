"""Random layers of the model, dropout above all, on numbers from the secret stream.

A dropout mask belongs to a position in the batch. Removing a record shifts the masks of the
records behind it, so for FIXED masks the sum could move by more than one clip norm. The guarantee
holds because masks are independent random numbers that nobody knows: the mechanism is a mixture
over masks, the same mixture for every record at every position, and divergences are jointly
convex. So the masks must be secret, fresh in every step, and not guessable: the whole state of
torch's generator (624 words) is filled from the secret stream for every micro-batch, where a seed
would leave only 32 bits to try. Known limit: torch's own generator (Mersenne Twister) then makes
the masks; it is not a cryptographic one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import torch

from ownerwise.randomness.stream import SecretStream, StepStream

_WORDS = 624
_WORDS_START = 24  # bytes of the generator's state before its words, each kept in 8 bytes
_STATE_BYTES = 5056


class LayerRandomness:
    """Generator states for the micro-batches of one step: the same number, the same masks.

    `stream` opens the step's numbers, and is called if a layer may need them. The default is a
    fixed seed: NOT private, for research.
    """

    def __init__(self, stream: Callable[[], StepStream] | None = None):
        self._open = _fixed_stream if stream is None else stream
        self._stream: StepStream | None = None
        self._words: list[np.ndarray] = []

    def enter(self, number: int) -> None:
        """Put torch's generators into the state of micro-batch `number`."""
        if self._stream is None:
            self._stream = self._open()
        while len(self._words) <= number:
            self._words.append(self._stream.words(_WORDS // 2).view(np.uint32))
        words = self._words[number]
        torch.default_generator.set_state(_state_of(words))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(words[:2].view(np.uint64)[0] >> np.uint64(1)))


def kept_generators() -> AbstractContextManager[None]:
    """Leave torch's global generators as they were found."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(list(gpus))


def _fixed_stream() -> StepStream:
    return SecretStream.from_seed(0).child("layers").at_step(0)


@cache
def _empty_state() -> torch.Tensor:
    state = torch.Generator().manual_seed(0).get_state()
    if len(state) != _STATE_BYTES:
        raise RuntimeError(
            f"torch's generator has a state of {len(state)} bytes; this version of ownerwise knows "
            f"{_STATE_BYTES}. Use another version of torch, or of ownerwise"
        )
    return state


def _state_of(words: np.ndarray) -> torch.Tensor:
    state = _empty_state().clone()
    state.numpy()[_WORDS_START : _WORDS_START + 8 * _WORDS].view("<u8")[:] = words
    return state
