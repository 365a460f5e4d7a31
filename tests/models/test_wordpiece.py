"""Texts as word pieces: derived by hand, and properties of the published list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.models import minilm
from ownerwise.models.wordpiece import WordPieces, split
from tools.text_tools import PIECES, real_texts

WORDS = WordPieces(PIECES)


def pieces(text: str, length: int = 12) -> list[str]:
    (ids,) = WORDS.encode([text], length)
    assert len(ids) == length
    return [PIECES[at] for at in ids]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t\n\r\u00a0\u3000\u2028", []),
        ("Mild FEVER", ["mild", "fever"]),
        ("Café naïve Ångström", ["cafe", "naive", "angstrom"]),
        ("e\u0301te\u0301", ["ete"]),  # accents as separate characters
        ("don't (ever)…", ["don", "'", "t", "(", "ever", ")", "…"]),
        (
            "$5 + 3^2=14 ~`x`|<br />",
            ["$", "5", "+", "3", "^", "2", "=", "14", "~", "`", "x", "`", "|", "<", "br", "/", ">"],
        ),
        ("日本語 text", ["日", "本", "語", "text"]),
        ("カタカナ", ["カタカナ"]),  # only Chinese characters stand alone
        ("\U00020000\uf900", ["\U00020000", "\u8c48"]),
        ("a\x00b\x07c\ufffdd\u200be\u00adf\x0bg\x85h", ["abcdefgh"]),  # control characters
        ("👍🏽great 🎉", ["👍🏽great", "🎉"]),  # symbols are parts of words
        ("İstanbul ΟΔΟΣ ẞ", ["istanbul", "οδοσ", "ß"]),  # each letter alone: no final sigma
        ("\ud800x", ["x"]),  # half of a character
        ("[CLS] x", ["[", "cls", "]", "x"]),  # no special meaning in a text
    ],
)
def test_words(text, words):
    assert split(text) == words


def test_pieces_are_the_longest_in_the_list_from_left_to_right():
    assert pieces("unhappily")[1:-8] == ["un", "##happi", "##ly"]
    assert pieces("unhappy", 5) == ["[CLS]", "un", "##happy", "[SEP]", "[PAD]"]  # not ##happi
    assert pieces("happy", 4) == ["[CLS]", "[UNK]", "[SEP]", "[PAD]"]  # listed only inside words
    assert pieces("unq", 4) == ["[CLS]", "[UNK]", "[SEP]", "[PAD]"]  # the whole word
    assert pieces("mild, fever", 6) == ["[CLS]", "mild", ",", "fever", "[SEP]", "[PAD]"]


def test_long_words_are_unknown():
    assert pieces("a" * 100, 103) == ["[CLS]", "a", *["##a"] * 99, "[SEP]", "[PAD]"]
    assert pieces("a" * 101, 4) == ["[CLS]", "[UNK]", "[SEP]", "[PAD]"]


def test_long_texts_are_cut():
    assert pieces("mild fever mild", 4) == ["[CLS]", "mild", "fever", "[SEP]"]
    assert pieces("unhappily", 4) == ["[CLS]", "un", "##happi", "[SEP]"]
    assert pieces("fever " * 10_000, 3) == ["[CLS]", "fever", "[SEP]"]


@given(st.lists(st.text(), max_size=5), st.integers(3, 20))
def test_each_text_is_encoded_alone(texts, length):
    found = WORDS.encode(texts, length)
    assert found == [WORDS.encode([text], length)[0] for text in texts]
    for ids in found:
        named = [PIECES[at] for at in ids]
        assert named[0] == "[CLS]"
        end = named.index("[SEP]")
        assert named[end + 1 :] == ["[PAD]"] * (length - end - 1)
        assert not {"[CLS]", "[PAD]", "[SEP]"} & {*named[1:end]}


@real_texts
def test_the_published_list():
    words = minilm.MiniLM().words
    assert len(words.ids) == 30522
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert [words.ids[name] for name in special] == [0, 100, 101, 102, 103]
    whole = [p for p in words.ids if not p.startswith(("##", "[")) and split(p) == [p]]
    assert len(whole) > 23_000  # the others are, for example, names of unused places
    assert all(words.pieces_of(piece) == [words.ids[piece]] for piece in whole)
    named = list(words.ids)
    text = "Embeddings of unaffable words, naïvely."
    assert [named[at] for at in words.encode([text], 16)[0]] == (
        [
            "[CLS]",
            "em",
            "##bed",
            "##ding",
            "##s",
            "of",
            "una",
            "##ffa",
            "##ble",
            "words",
            ",",
            "naive",
            "##ly",
            ".",
            "[SEP]",
            "[PAD]",
        ]
    )
