"""The secret stream: all random numbers in a run, derived from one secret key.

Guarantee. The key never leaves the process, unless several processes train together: the first one
then sends it to the others, and nothing writes it. The numbers are an AES-256-CTR key stream under
this key, which comes from the operating system, so nobody without the key can distinguish them from
uniform bits (PRF bound: the distinguishing advantage for a run of 2^32 blocks is below 2^-64). They
do not depend on the global seeds of Python, numpy or torch, on DataLoader workers, or on draws for
other purposes.

Keys form a tree: `stream.child("noise")` has its own secret, derived from its parent's by
HKDF-Expand, and the drawing key is derived from that secret in turn. Step t of a stream uses the
counter range [t 2^64, (t+1) 2^64) of that key. The draws for (purpose, step) are therefore a
function of the key alone: a resumed run with the same fixed seed draws exactly the same bits for
step t as before, no matter what was drawn in between.

No (key, counter) pair is used twice:
- within a step the counter only advances;
- a stream opens each step at most once, in ascending order, even if several threads share it;
- a private stream hands out each child at most once, and cannot be pickled or copied;
- a forked process gets an ERROR, not a new key: a new key would silently give different batches to
  the processes of a run. These draw the same numbers on purpose, once `share` was called, and use
  them for a single step that they take together.
A stream with a fixed seed is reproducible, and therefore not private.

References: NIST SP 800-38A (CTR mode), RFC 5869 (HKDF); Garfinkel & Leclerc, "Randomness Concerns
When Deploying Differential Privacy", WPES 2020 (why the generator must be cryptographic).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from typing import NoReturn, Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ownerwise.errors import OwnerwiseError
from ownerwise.processes import Processes

_STEPS = 2**64
_WORDS_PER_STEP = 2**65  # 2^64 AES blocks of two 64-bit words
_FEWEST_WORDS = 256  # drawn at once for coin flips
_ZEROS = memoryview(bytes(2**21))  # what is encrypted, unless more words are drawn at once
SPARE = 15  # bytes of a block that the cipher may write beyond the words


class SecretStream:
    """A node in the key tree that creates children for other purposes and opens its own steps.

    `SecretStream()` takes its key from the operating system and is private: the key is never shown
    or stored. `SecretStream.from_seed(7)` is repeatable and not private: `private` is False, and
    everything computed with it must be marked "not private".

    Example:
        >>> stream = SecretStream()
        >>> noise = stream.child("noise")
        >>> noise.at_step(0).uniforms(10).shape
        (10,)
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._seed: int | None = None
        self._path = ""
        self._open()

    @classmethod
    def from_seed(cls, seed: int) -> Self:
        """Return a repeatable stream for tests and research; it is NOT private."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        label = b"ownerwise fixed seed, not private:%d" % int(seed)
        return cls._make(hashlib.sha256(label).digest(), int(seed), "")

    @classmethod
    def _make(cls, secret: bytes, seed: int | None, path: str) -> Self:
        stream = cls.__new__(cls)
        stream._secret, stream._seed, stream._path = secret, seed, path
        stream._open()
        return stream

    def _open(self) -> None:
        self._draw_key = _derive(self._secret, b"draw")
        self._process = os.getpid()
        self._children: set[str] = set()
        self._next_step = 0
        self._shared = False
        self._lock = threading.Lock()  # makes each check and update atomic

    @property
    def private(self) -> bool:
        """Whether the key came from the operating system; False for a fixed seed."""
        return self._seed is None

    @property
    def seed(self) -> int | None:
        """The fixed seed, or None for a private stream."""
        return self._seed

    def child(self, purpose: str) -> Self:
        """Return the stream for one purpose, independent of all other purposes.

        A private stream hands out each child once: two users of one child would draw the same
        numbers. With a fixed seed, a second call restarts the child.
        """
        _check_process(self._process)
        with self._lock:
            if self.private and purpose in self._children:
                raise RuntimeError(
                    f"the purpose {purpose!r} of this stream is already in use: a second user "
                    "would repeat its numbers. Create one SecretStream() per run"
                )
            self._children.add(purpose)
        secret = _derive(self._secret, b"child:" + purpose.encode())
        return self._make(secret, self._seed, f"{self._path}/{purpose}")

    def share(self, processes: Processes) -> None:
        """Let all processes of a group draw the same numbers: they take the key of the first one.

        All processes must call this, before the stream is used. The key is sent in memory, through
        the group; a stream with a fixed seed needs no key, but the seeds must be the same.
        """
        if not processes.several:
            return
        self.check_process()
        used = self.private and not self._shared and bool(self._children or self._next_step)
        found = processes.all_of((self._seed, self._path, self._shared, used))
        if len({state[:3] for state in found}) > 1:
            raise OwnerwiseError(
                "the processes have streams with different seeds or histories: create the stream "
                "in the same way in all of them"
            )
        if any(state[3] for state in found):
            raise OwnerwiseError(
                "the stream was used before the processes agreed on its key: initialise the "
                "process group first, and create a new SecretStream()"
            )
        if self.private and not self._shared:
            key = torch.frombuffer(bytearray(self._secret), dtype=torch.uint8)
            processes.from_first([key])
            self._secret = key.numpy().tobytes()
            self._draw_key = _derive(self._secret, b"draw")
        self._shared = True

    def check_process(self) -> None:
        """Raise an error in a forked process, which must not use this stream or its numbers."""
        _check_process(self._process)

    def at_step(self, step: int) -> StepStream:
        """Open one step's random numbers; each step can be opened once, in ascending order."""
        self.check_process()
        with self._lock:
            if not self._next_step <= step < _STEPS:
                raise RuntimeError(
                    f"step {step} of {self!r} is closed (the next one is {self._next_step}): "
                    "drawing it again would reuse its randomness"
                )
            self._next_step = int(step) + 1
        return StepStream(self._draw_key, int(step), self._process)

    def __repr__(self) -> str:
        kind = "private" if self.private else f"NOT PRIVATE: fixed seed {self._seed}"
        return f"SecretStream({kind}, purpose={self._path or '/'!r})"

    def __reduce__(self) -> NoReturn:
        _refuse_copy()


class StepStream:
    """The random numbers of one purpose and step, opened by `SecretStream.at_step`."""

    def __init__(self, key: bytes, step: int, process: int) -> None:
        counter = step.to_bytes(8, "big") + bytes(8)
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
        self._step = step
        self._process = process
        self._position = 0  # words drawn so far
        self._coins = np.zeros(0, dtype=np.uint8)  # drawn ahead

    def words(self, count: int, memory: np.ndarray | None = None) -> np.ndarray:
        """Return uniform 64-bit words, uint64 [count].

        Args:
            count: how many.
            memory: where to put them, uint8, with at least `SPARE` bytes more than they need.
        """
        _check_process(self._process)
        if self._position + count > _WORDS_PER_STEP:
            raise OverflowError(f"step {self._step} is exhausted: its counter would overflow")
        self._position += count
        size = 8 * count
        memory = np.empty(size + SPARE, dtype=np.uint8) if memory is None else memory
        zeros = _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)
        self._encryptor.update_into(zeros, memory.data)
        return memory[:size].view("<u8")

    def coins(self, count: int) -> np.ndarray:
        """Return fair coin flips, each 0 or 1, uint8 [count]; they are drawn in larger blocks."""
        _check_process(self._process)
        if count > len(self._coins):
            words = self.words(max(_FEWEST_WORDS, -(-count // 64)))
            self._coins = np.unpackbits(words.view(np.uint8))
        drawn, self._coins = self._coins[:count], self._coins[count:]
        return drawn

    def uniforms(self, count: int) -> np.ndarray:
        """Return multiples of 2^-53, uniform on [0, 1), float64 [count]."""
        return (self.words(count) >> np.uint64(11)) * 2.0**-53

    def integers(self, high: int, count: int) -> np.ndarray:
        """Return integers in {0, ..., high - 1}, exactly uniform (by rejection), int64 [count]."""
        if not 1 <= high <= 2**63:
            raise ValueError(f"high must be in [1, 2^63], got {high}")
        largest = np.uint64(2**64 - 2**64 % high - 1)  # keeps whole cycles of `high`
        kept = self.words(count)
        kept = kept[kept <= largest]
        while len(kept) < count:
            more = self.words(count - len(kept))
            kept = np.concatenate([kept, more[more <= largest]])
        return (kept % np.uint64(high)).astype(np.int64)

    def __repr__(self) -> str:
        return f"StepStream(step={self._step}, position={self._position})"

    def __reduce__(self) -> NoReturn:
        _refuse_copy()


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDFExpand(algorithm=SHA256(), length=32, info=info).derive(secret)


def _check_process(owner: int) -> None:
    if os.getpid() != owner:
        raise RuntimeError(
            f"this secret stream belongs to process {owner}, but process {os.getpid()} was forked "
            "from it: both would draw the same numbers. Draw in the parent, or create a "
            "SecretStream() in the child"
        )


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "a secret stream cannot be pickled or copied: a copy would repeat its numbers, and a "
        "stored key would let a reader subtract the noise. Create a new SecretStream() instead"
    )


def random_order(stream: StepStream, count: int) -> np.ndarray:
    """Return the numbers from 0 to count - 1 in uniformly random order."""
    return np.argsort(stream.words(count), kind="stable")
