"""Words as numbers, and what a list of words gives away."""

import pytest

from ownerwise.data import Vocabulary, tokenize
from ownerwise.data.vocabulary import PADDING, UNKNOWN
from ownerwise.errors import PrivacyWarning
from tools.data_tools import problems


def test_tokenize():
    text = "It's GREAT,<br /><br />10/10 -- don't miss it."
    assert tokenize(text) == ["it's", "great", "10", "10", "don't", "miss", "it"]
    assert tokenize("") == []


class TestHashed:
    def test_places_are_fixed(self):
        """CRC-32 of "film" and "fun", by zlib: the same on every machine, in every version."""
        places = Vocabulary.hashed(1002).encode(["film", "fun", "film"], 4)
        film, fun = 2 + 0x8244BE22 % 1000, 2 + 0x4B59AF6C % 1000
        assert places.tolist() == [film, fun, film, PADDING]

    def test_all_places_are_in_range(self):
        places = Vocabulary.hashed(10).encode([f"word{k}" for k in range(500)], 500)
        assert sorted(set(places.tolist())) == [*range(2, 10)]

    def test_size(self):
        problems(lambda: Vocabulary.hashed(2), "size 2", "at least 3")


class TestListed:
    def test_places_follow_the_list(self):
        vocabulary = Vocabulary.listed(["good", "bad"])
        assert vocabulary.size == 4
        assert vocabulary.encode(["bad", "ugly", "good", "bad"], 3).tolist() == [3, UNKNOWN, 2]
        assert vocabulary.encode([], 2).tolist() == [PADDING, PADDING]
        assert vocabulary.not_private == ""

    def test_unknown_words_leave_no_trace(self):
        vocabulary = Vocabulary.listed(["good"])
        vocabulary.encode(["secret"], 1)
        assert "secret" not in vocabulary._places

    @pytest.mark.parametrize("words", [[], ["a", "a"]])
    def test_each_word_once(self, words):
        problems(lambda: Vocabulary.listed(words), f"{len(words)} words")


def test_counted_is_marked():
    texts = [["b", "a"], ["c", "b"], ["c", "b"]]
    with pytest.warns(PrivacyWarning, match="NOT private"):
        vocabulary = Vocabulary.counted(texts, size=4)
    assert vocabulary.words == ("b", "c")
    assert "training texts" in vocabulary.not_private
