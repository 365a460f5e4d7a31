"""Texts as pieces of words from a public list, as BERT reads them.

A text is converted to lower case, its accents are removed, and it is split at spaces, around
punctuation and around Chinese characters. Each word is then cut into the longest pieces in the
list, from left to right; pieces that continue a word are listed with `##` in front. Nothing depends
on other texts.

References:
    Devlin, Chang, Lee, Toutanova (2019), "BERT: Pre-training of Deep Bidirectional Transformers for
    Language Understanding".
    Wu et al. (2016), "Google's Neural Machine Translation System" (the pieces).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

PADDING, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_LONGEST_WORD = 100  # letters; a longer word is unknown
_REMOVED = ("Cc", "Cf", "Co", "Cs", "Mn")  # control characters, private use, surrogates, accents
_CHINESE = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class WordPieces:
    """Encodes texts as ids of pieces.

    Args:
        pieces: the public list; the id of a piece is its position.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.ids: Mapping[str, int] = {piece: at for at, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))

    def encode(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return `length` ids per text: the start, at most `length - 2` pieces, the end, padding.

        The names of the special pieces have no special meaning in a text.
        """
        known: dict[str, list[int]] = {}  # only for this call: the words are private
        return [self._encode(text, length, known) for text in texts]

    def _encode(self, text: str, length: int, known: dict[str, list[int]]) -> list[int]:
        found = [self.ids[START]]
        for word in split(text):
            if word not in known:
                known[word] = self.pieces_of(word)
            found += known[word]
            if len(found) >= length:
                break
        found = [*found[: length - 1], self.ids[END]]
        return found + [self.ids[PADDING]] * (length - len(found))

    def pieces_of(self, word: str) -> list[int]:
        """Return the ids of a word's pieces, or the id of an unknown word."""
        found: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            longest = min(len(word), start + self._longest)
            for end in range(longest, start, -1):
                piece = self.ids.get("##" * (start > 0) + word[start:end])
                if piece is not None:
                    break
            else:
                return [self.ids[UNKNOWN]]
            found.append(piece)
            start = end
        return found or [self.ids[UNKNOWN]]


def split(text: str) -> list[str]:
    """Return the words of a text, in lower case and without accents.

    Example:
        >>> split("Café, 東京!")
        ['cafe', ',', '東', '京', '!']
    """
    return unicodedata.normalize("NFD", text).translate(_CHARACTERS).split()


class _Characters(dict[int, str]):
    """What replaces each character: nothing, a space, or the character in lower case."""

    def __missing__(self, code: int) -> str:
        self[code] = replacement = _replacement(chr(code))
        return replacement


def _replacement(character: str) -> str:
    kind = unicodedata.category(character)
    if character in "\t\n\r" or kind[0] == "Z":
        return " "
    if kind in _REMOVED or character == "\N{REPLACEMENT CHARACTER}":
        return ""
    alone = kind[0] == "P" or character in "$+<=>^`|~" or _is_chinese(character)
    return f" {character} " if alone else character.lower()


def _is_chinese(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CHINESE)


_CHARACTERS = _Characters()
