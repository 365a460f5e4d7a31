"""Random layers, mainly dropout, driven by the secret stream.

A dropout mask is tied to a position in the batch. Removing a record shifts the masks of all later
records, so for FIXED masks the sum could change by more than one clip norm. The guarantee holds
because the masks are independent random numbers that nobody knows: the mechanism is a mixture over
masks, whose distribution is the same for every record at every position, and divergences are
jointly convex. The masks must therefore be secret, freshly drawn at every step, and impossible to
guess. For every micro-batch the full state of torch's generator (624 words) is filled from the
secret stream; a seed would have only 32 bits. Known limitation: the masks then come from torch's
own generator (Mersenne Twister), which is not cryptographically secure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import torch

from ownerwise.randomness.stream import SecretStream, StepStream

_WORDS = 624
_WORDS_START = 24  # offset of the words in the generator's state; each word takes 8 bytes
_STATE_BYTES = 5056


class LayerRandomness:
    """Generator states for a step's micro-batches; the same index always gives the same masks.

    `stream` opens the step's random numbers and is called only if a layer may need them. The
    default stream has a fixed seed, for research; it is NOT private.
    """

    def __init__(self, stream: Callable[[], StepStream] | None = None):
        self._open = _fixed_stream if stream is None else stream
        self._stream: StepStream | None = None
        self._words: list[np.ndarray] = []

    def enter(self, number: int) -> None:
        """Set torch's generators to the state for micro-batch `number`."""
        if self._stream is None:
            self._stream = self._open()
        while len(self._words) <= number:
            self._words.append(self._stream.words(_WORDS // 2).view(np.uint32))
        words = self._words[number]
        torch.default_generator.set_state(_state_of(words))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(words[:2].view(np.uint64)[0] >> np.uint64(1)))


def kept_generators() -> AbstractContextManager[None]:
    """Return a context manager that restores torch's global generators on exit."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(list(gpus))


def _fixed_stream() -> StepStream:
    return SecretStream.from_seed(0).child("layers").at_step(0)


@cache
def _empty_state() -> torch.Tensor:
    state = torch.Generator().manual_seed(0).get_state()
    if len(state) != _STATE_BYTES:
        raise RuntimeError(
            f"the state of torch's generator has {len(state)} bytes, but this version of ownerwise "
            f"expects {_STATE_BYTES}. Use another version of torch or ownerwise"
        )
    return state


def _state_of(words: np.ndarray) -> torch.Tensor:
    state = _empty_state().clone()
    state.numpy()[_WORDS_START : _WORDS_START + 8 * _WORDS].view("<u8")[:] = words
    return state
