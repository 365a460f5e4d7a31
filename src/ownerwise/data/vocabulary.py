"""Encode words as integer ids. A vocabulary built from private text reveals words in it.

Every word in such a vocabulary occurs in the private text. A rare name in the list can identify a
person, and noise added during training cannot undo that. The default vocabulary is therefore not a
list: a public function hashes words into a fixed number of ids, whatever the texts contain. A list
built from public text is equally safe. You can also use a list of the most frequent words in the
training texts, as is common in papers, but it triggers a warning and is marked as not private.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ownerwise.errors import OwnerwiseError, PrivacyWarning

PADDING, UNKNOWN = 0, 1
"""The two reserved ids, for padding after the end of a text and for words not in the list."""
_RESERVED = 2
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def tokenize(text: str) -> list[str]:
    """Return the words of a text in lower case, without markup, punctuation or line breaks."""
    return _WORD.findall(text.lower().replace("<br />", " "))


class _Places(dict[str, int]):
    """Maps listed words to their ids; other words are hashed or get the id `UNKNOWN`."""

    def __init__(self, words: Sequence[str] = (), hashed: int = 0):
        super().__init__((word, place) for place, word in enumerate(words, _RESERVED))
        self.hashed = hashed

    def __missing__(self, word: str) -> int:
        if not self.hashed:
            return UNKNOWN
        place = self[word] = _RESERVED + zlib.crc32(word.encode()) % self.hashed
        return place


@dataclass(frozen=True)
class Vocabulary:
    """Maps each word to an id from 0 to size - 1; created by `hashed`, `listed` or `counted`.

    Attributes:
        size: number of ids, and therefore of rows in an embedding table.
        words: the listed words, in the order of their ids; empty if words are hashed.
        not_private: if the list was computed from the training texts, a note that says so.
    """

    size: int
    words: tuple[str, ...] = ()
    not_private: str = ""
    _places: _Places = field(default_factory=_Places, repr=False, compare=False)

    @classmethod
    def hashed(cls, size: int = 20_000) -> Vocabulary:
        """Return a vocabulary that does not depend on any text: CRC-32 maps each word to its id.

        Several words may share an id; with 20,000 ids, this has little effect.
        """
        _check_size(size)
        return cls(size, _places=_Places(hashed=size - _RESERVED))

    @classmethod
    def listed(cls, words: Sequence[str], not_private: str = "") -> Vocabulary:
        """Return the vocabulary for a public list in which each word occurs once."""
        words = tuple(words)
        places = _Places(words)
        if len(places) < len(words) or not words:
            raise OwnerwiseError(
                f"a list of {len(words)} words, {len(places)} of them distinct; expected at "
                "least one word, and each only once"
            )
        return cls(len(words) + _RESERVED, words, not_private, places)

    @classmethod
    def counted(cls, texts: Iterable[Sequence[str]], size: int = 20_000) -> Vocabulary:
        """Return a vocabulary of the most frequent words in tokenized texts, most frequent first.

        NOT private: the list is released without noise, and `not_private` says so. Words with equal
        counts are in alphabetical order.
        """
        _check_size(size)
        warnings.warn(
            "a vocabulary computed from the training texts is released without noise: it is NOT "
            "private; use the default (hashed) or a public list instead",
            PrivacyWarning,
            stacklevel=2,
        )
        counts = Counter(word for text in texts for word in text)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - _RESERVED]
        return cls.listed(ranked, "the vocabulary: the most frequent words in the training texts")

    def encode(self, text: Sequence[str], length: int) -> np.ndarray:
        """Return the ids of the first `length` words as int64, padded with `PADDING`."""
        places = np.full(length, PADDING, dtype=np.int64)
        kept = text[:length]
        places[: len(kept)] = list(map(self._places.__getitem__, kept))
        return places


def _check_size(size: int) -> None:
    if size <= _RESERVED:
        raise OwnerwiseError(
            f"a vocabulary of size {size}; expected at least {_RESERVED + 1}: two ids are "
            "reserved for padding and unknown words"
        )
