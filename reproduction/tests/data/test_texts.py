"""Surnames and film reviews."""

import numpy as np
import pytest

from made_files import make_imdb, make_surname_archive, make_surnames, review_files
from ownerwise.data.vocabulary import UNKNOWN
from ownerwise.errors import PrivacyWarning
from ownerwise_reproduction import data
from ownerwise_reproduction.data.texts import ALPHABET
from tools.data_tools import problems, write


def spelled(row):
    return "".join(ALPHABET[place - 2] if place > 1 else "#" for place in row if place)


class TestSurnames:
    @pytest.mark.parametrize("make", [make_surnames, make_surname_archive])
    def test_letters(self, root, make):
        make(root / "surnames")
        loaded = data.load_surnames(root, download=False)
        assert len(loaded.classes) == 18
        assert (len(loaded.train), len(loaded.test)) == (18 * 5, 18)
        assert loaded.train.inputs.shape == (90, 20)
        assert loaded.train.inputs.dtype == np.int64
        names = [spelled(row) for row in loaded.train.inputs[:5]]
        assert names == ["Arabico", "Abe", "O'Neil", "Li", "Xu"]
        assert [spelled(row) for row in loaded.test.inputs[:2]] == ["Wu", "Wu"]
        assert loaded.train.columns["length"][:5].tolist() == [7, 3, 6, 2, 2]
        assert loaded.train.inputs.max() < len(ALPHABET) + 2

    def test_length_and_other_letters(self, root):
        make_surnames(root / "surnames")
        write(root / "surnames" / "names" / "Arabic.txt", "Łódzki/1\n\nß\n")
        loaded = data.load_surnames(root, download=False, length=4)
        assert spelled(loaded.train.inputs[0]) == "#odz"
        assert loaded.train.inputs[1].tolist() == [1, 0, 0, 0]
        assert loaded.train.columns["length"][:2].tolist() == [4, 1]

    def test_languages_missing(self, root):
        make_surnames(root / "surnames")
        (root / "surnames" / "names" / "Greek.txt").unlink()
        write(root / "surnames" / "names" / "Irish.txt", "\n\n")
        problems(lambda: data.load_surnames(root), "Greek, Irish")

    def test_damaged_archive(self, root):
        write(root / "surnames" / "data.zip", b"PK no archive")
        problems(lambda: data.load_surnames(root), "data.zip")

    def test_other_encoding(self, root):
        make_surnames(root / "surnames")
        write(root / "surnames" / "names" / "German.txt", "Müller".encode("latin-1"))
        problems(lambda: data.load_surnames(root), "surnames by language")


class TestReviews:
    def test_hashed_by_default(self, root):
        make_imdb(root / "imdb")
        loaded = data.load_imdb(root, download=False, length=6, size=1000)
        assert (len(loaded.train), len(loaded.test)) == (6, 6)
        assert loaded.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
        assert loaded.train.columns["rating"].tolist() == [2, 2, 2, 9, 9, 9]
        assert loaded.train.columns["length"].tolist() == [5] * 6  # neg film no 0 train
        words = loaded.train.inputs
        assert words.shape == (6, 6)
        assert (words[:, 5] == 0).all()
        assert words[:, :5].min() >= 2
        assert words.max() < 1000
        assert len(set(words[:, 1])) == 1  # film
        assert words[0, 0] != words[3, 0]  # neg and pos
        assert loaded.not_private == ()

    def test_nothing_depends_on_other_texts(self, root):
        for name, text in review_files().items():
            write(root / name, text)
        before = data.load_imdb(root, download=False).train.inputs
        write(root / "aclImdb" / "train" / "neg" / "0_2.txt", "quite another review")
        after = data.load_imdb(root, download=False).train.inputs
        assert (after[0] != before[0]).any()
        assert (after[1:] == before[1:]).all()

    def test_folder(self, root):
        for name, text in review_files().items():
            write(root / name, text)
        assert len(data.load_imdb(root, download=False).train) == 6

    def test_counted_vocabulary_is_marked(self, root):
        make_imdb(root / "imdb")
        with pytest.warns(PrivacyWarning, match="NOT private"):
            loaded = data.load_imdb(root, download=False, vocabulary="counted", size=5)
        assert "vocabulary" in loaded.not_private[0]
        # film, no and train stand in every training review; ties go by the alphabet
        assert loaded.train.inputs[0, :5].tolist() == [UNKNOWN, 2, 3, UNKNOWN, 4]

    def test_public_list(self, root):
        make_imdb(root / "imdb")
        loaded = data.load_imdb(root, download=False, vocabulary=["pos", "neg"])
        assert loaded.train.inputs[0, :2].tolist() == [3, UNKNOWN]
        assert loaded.not_private == ()

    def test_part_of_the_test_reviews(self, root):
        make_imdb(root / "imdb")
        options = {"download": False, "vocabulary": "none"}
        whole, part = data.load_imdb(root, **options), data.load_imdb(root, tests=4, **options)
        assert len(part.train) == len(whole.train)
        assert len(set(part.test.inputs)) == 4
        assert set(part.test.inputs) < set(whole.test.inputs)
        again = data.load_imdb(root, tests=4, **options)
        assert part.test.inputs.tolist() == again.test.inputs.tolist()

    def test_whole_reviews(self, root):
        for name, text in review_files().items():
            write(root / name, text)
        write(root / "aclImdb" / "train" / "neg" / "0_2.txt", "Dull.<br /><br />It's long")
        loaded = data.load_imdb(root, download=False, vocabulary="none")
        assert loaded.train.are_texts
        assert loaded.train.inputs[0] == "Dull.  It's long"
        assert loaded.train.columns["length"].tolist() == [3, 5, 5, 5, 5, 5]
        assert loaded.train.columns["rating"].tolist() == [2, 2, 2, 9, 9, 9]
        assert loaded.test.targets.tolist() == [0, 0, 0, 1, 1, 1]
        assert loaded.not_private == ()

    def test_other_vocabulary(self, root):
        problems(lambda: data.load_imdb(root, vocabulary="words"), "'words'", "'hashed'")

    def test_parts_missing(self, root):
        for name, text in review_files().items():
            if "test/pos" not in name:
                write(root / name, text)
        problems(lambda: data.load_imdb(root), "no reviews in test/pos")

    def test_cut_short(self, root):
        make_imdb(root / "imdb")
        path = root / "imdb" / "aclImdb_v1.tar.gz"
        path.write_bytes(path.read_bytes()[:200])
        problems(lambda: data.load_imdb(root), str(path))
