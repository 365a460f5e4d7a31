"""Texts as rows of token ids: one id per letter for surnames, one per word for film reviews."""

from __future__ import annotations

import os
import re
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ownerwise.data.reading import read_bytes, reading
from ownerwise.data.records import DataSet, Records
from ownerwise.data.splits import positional_split
from ownerwise.data.vocabulary import PADDING, Vocabulary, tokenize
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction.data.sources import Download, Part, Source, locate

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ '-,."
"""A letter is encoded as 2 + its position here; 0 is padding, and 1 is any other character."""
NAME_LENGTH = 20

_LANGUAGES = {
    "Arabic": "6f424a8dbe51cbbbabab7a57d38b617210125e4e3991f3c657cb79b8f104bafc",
    "Chinese": "49263ef55a8cb1740e841d65cad8214b2f9b5b869bc534c811746422496fa91e",
    "Czech": "145bbbd6d0816578f03388e92c264d39ef1c60df920b081d371fa5c5cc055a8e",
    "Dutch": "924f32b635170eae561f84538632138fc07d4c8bbd70ba3fb980de1ecc4d2af3",
    "English": "9cca037066d3d5989e24bc01801416162de506b5e28e15b7c092a47905d29bf2",
    "French": "81e65b36c60ed5b89a17422f6edcadbb89546f38ad69e960e64e7ba682012a95",
    "German": "7449cd590b97a733e18d613a4155decd77ec35dc5f8aadd7a82204dce4f051db",
    "Greek": "3555b5186de7f401e6d991b088e9e644ca3099116477818c25ab5793801389e6",
    "Irish": "cf8c7013256252a88d2503127b87282a11f21b2ff6db1bded68834c19a1ec058",
    "Italian": "f88414c27d0606a11a678b4859277828c2565d6cc4d9ee932deef6e94f3b35e4",
    "Japanese": "e0e717e114fec3e7eade4d9dabe0067c475f43147e36a22b47902ee76ad9e67f",
    "Korean": "cd54221ccb362a6cba4c78828838cf3268a0e59744767a37cf6ec4b74036b136",
    "Polish": "45bab898af2f60ed3a728bbf6980e28821011a7caa53227553b5785903a40826",
    "Portuguese": "50a8735f41f4f73757c8ce5b16cb0275cd86b2b214bcbc8c9805f508cb131c53",
    "Russian": "43b3e64ce351f77f1ac9e0cdf7566012d127f4371875fd25208845b5c9d6f7c3",
    "Scottish": "78d0252711d87d948ea86fe34826c51d2d794a8e52d15b5d6f7b6244d45d62dd",
    "Spanish": "1bcb462ed3316756a85781d68232bddae04498fdddd5d9219c53fd1fbdeba7a7",
    "Vietnamese": "f3f9e4164ab47601178a6e45b216464a64122f49d05541f24bf18a757253281d",
}
LANGUAGES = tuple(_LANGUAGES)
_NAMES_SITE = (
    "https://raw.githubusercontent.com/spro/practical-pytorch/"
    "ff2b4c46224c8f887910da343211a2e468eef9ac/data/names"
)
SURNAMES = Source(
    "surnames",
    "https://download.pytorch.org/tutorial/data.zip",
    (
        Part(
            ("names", "data/names", "data.zip"),
            tuple(
                Download(f"names/{language}.txt", (f"{_NAMES_SITE}/{language}.txt",), sha256)
                for language, sha256 in _LANGUAGES.items()
            ),
        ),
    ),
)

_IMDB_SITE = "https://ai.stanford.edu/~amaas/data/sentiment"
IMDB = Source(
    "imdb",
    _IMDB_SITE,
    (
        Part(
            ("aclImdb", "aclImdb_v1.tar.gz", "aclImdb_posneg.tar.xz"),
            (
                Download(
                    "aclImdb_v1.tar.gz",
                    (f"{_IMDB_SITE}/aclImdb_v1.tar.gz",),
                    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
                ),
            ),
        ),
    ),
)
_REVIEW = re.compile(r"(train|test)/(neg|pos)/(\d+)_(\d+)\.txt$")


def load_surnames(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    length: int = NAME_LENGTH,
) -> DataSet:
    """Return 20074 surnames from 18 languages, encoded letter by letter.

    Accents are removed, and only the first `length` letters are used; `ALPHABET` is fixed. There is
    no official split: every fifth name of each language, in the order of the files, is a test
    record. Some names occur several times, within a language or across languages, so some are in
    both the training and the test part. Column: `length`, the length of each name.
    """
    (path,) = locate(SURNAMES, data_dir, download)
    names = list(_read_names(path).items())
    targets = np.repeat(np.arange(len(names)), [len(lines) for _, lines in names])
    spelled = [name for _, lines in names for name in lines]
    letters = [[_letter(letter) for letter in _plain(name)][:length] for name in spelled]
    lengths = np.array([len(name) for name in letters], dtype=np.int64)
    inputs = np.zeros((len(letters), length), dtype=np.int64)
    inputs[np.arange(length) < lengths[:, None]] = [place for name in letters for place in name]
    records = Records(inputs, targets, {"length": lengths})
    test = positional_split(targets)
    return DataSet(
        "surnames",
        records.take(~test),
        records.take(test),
        LANGUAGES,
        form=f"int64 [{length}], letters 0 to {len(ALPHABET) + 1}, padded with 0",
    )


def load_imdb(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    length: int = 256,
    size: int = 20_000,
    vocabulary: str | Sequence[str] = "hashed",
    tests: int | None = None,
) -> DataSet:
    """Return IMDb in its official split: 25000 + 25000 film reviews, negative or positive.

    A vocabulary built from private text is itself a release of information about it. By default, no
    vocabulary is used: words are hashed (see `ownerwise.data.vocabulary`).

    Args:
        data_dir, download: as for `load`.
        length: number of words to keep from the start of each review.
        size: number of token ids, and thus of rows in the embedding layer.
        vocabulary: "hashed"; a public list of words; "counted", the most frequent words in the
            training reviews, which is NOT private; or "none": the inputs are then the whole reviews
            as texts, for a feature extractor such as `MiniLM`, and `length` and `size` have no
            effect.
        tests: number of test reviews to keep, chosen at random but always the same ones; by
            default, all.

    Columns: `rating` (1 to 10) and `length` (number of words kept).
    """
    if isinstance(vocabulary, str) and vocabulary not in ("hashed", "counted", "none"):
        raise OwnerwiseError(
            f"vocabulary {vocabulary!r}; expected 'hashed', 'counted', 'none' or a list of words"
        )
    (path,) = locate(IMDB, data_dir, download)
    parts: dict[str, list] = {"train": [], "test": []}
    with reading(path, "the reviews of IMDb"):
        for part, label, number, rating, content in _read_reviews(path):
            parts[part].append((label, int(number), int(rating), content.decode()))
    lacking = [
        f"{part}/{label}"
        for part, reviews in parts.items()
        for label in ("neg", "pos")
        if not any(review[0] == label for review in reviews)
    ]
    if lacking:
        raise OwnerwiseError(
            f"{path} has no reviews in {', '.join(lacking)}; expected the folders of aclImdb: "
            f"download it again from {IMDB.page}"
        )
    for reviews in parts.values():
        reviews.sort(key=lambda review: review[:2])
    if tests is not None:
        chosen = np.random.default_rng(0).permutation(len(parts["test"]))[:tests]
        parts["test"] = [parts["test"][at] for at in chosen]
    if vocabulary == "none":
        train, test = map(_plain_reviews, parts.values())
        return DataSet("imdb", train, test, ("negative", "positive"), form="texts")
    words = _vocabulary(vocabulary, size, parts["train"])
    train, test = (_encode_reviews(reviews, words, length) for reviews in parts.values())
    return DataSet(
        "imdb",
        train,
        test,
        ("negative", "positive"),
        form=f"int64 [{length}], words 0 to {words.size - 1}, padded with 0",
        not_private=(words.not_private,) if words.not_private else (),
    )


def _read_names(path: Path) -> dict[str, list[str]]:
    """Return the names in each language from a folder, or from the tutorial's archive."""
    contents = {}
    with reading(path, "surnames by language"):
        if path.is_dir():
            files = [path / f"{language}.txt" for language in LANGUAGES]
            contents = {file.stem: file.read_bytes() for file in files if file.is_file()}
        else:
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    if Path(member).match("names/*.txt") and "__MACOSX" not in member:
                        contents[Path(member).stem] = archive.read(member)
        names = {
            language: [line.strip() for line in contents[language].decode("utf-8").splitlines()]
            for language in LANGUAGES
            if language in contents
        }
    missing = [language for language in LANGUAGES if not any(names.get(language, []))]
    if missing:
        raise OwnerwiseError(
            f"{path} has no names for {', '.join(missing)}; expected one text file per language, "
            f"such as Arabic.txt: download it again from {SURNAMES.page}"
        )
    return {language: [name for name in lines if name] for language, lines in names.items()}


def _plain(name: str) -> str:
    """Return a name without its accents."""
    apart = unicodedata.normalize("NFD", name)
    return "".join(letter for letter in apart if unicodedata.category(letter) != "Mn")


def _letter(letter: str) -> int:
    return ALPHABET.find(letter) + 2  # 1 for other characters, since find returns -1


def _read_reviews(path: Path) -> Iterator[tuple[str, str, str, str, bytes]]:
    """Yield (part, label, number, rating, content) for each review in a folder or archive."""
    if path.is_dir():
        for file in path.glob("*/*/*.txt"):
            found = _REVIEW.search(file.as_posix())
            if found:
                yield (*found.groups(), read_bytes(file))  # type: ignore[misc]
        return
    with tarfile.open(path) as archive:
        for member in archive:
            found = _REVIEW.search(member.name)
            file = archive.extractfile(member) if found else None
            if found and file is not None:
                yield (*found.groups(), file.read())  # type: ignore[misc]


def _vocabulary(given: str | Sequence[str], size: int, train: list) -> Vocabulary:
    if given == "hashed":
        return Vocabulary.hashed(size)
    if given == "counted":
        return Vocabulary.counted((tokenize(text) for *_, text in train), size)
    return Vocabulary.listed(given)


def _encode_reviews(reviews: list, words: Vocabulary, length: int) -> Records:
    inputs = np.stack([words.encode(tokenize(text), length) for *_, text in reviews])
    return _records(reviews, inputs, (inputs != PADDING).sum(axis=1))


def _plain_reviews(reviews: list) -> Records:
    """Return the reviews as texts, without the markup of line breaks."""
    inputs = np.empty(len(reviews), dtype=object)
    inputs[:] = [text.replace("<br />", " ") for *_, text in reviews]
    return _records(reviews, inputs, np.array([len(tokenize(text)) for text in inputs]))


def _records(reviews: list, inputs: np.ndarray, lengths: np.ndarray) -> Records:
    targets = np.array([label == "pos" for label, *_ in reviews], dtype=np.int64)
    ratings = np.array([rating for _, _, rating, _ in reviews], dtype=np.int64)
    return Records(inputs, targets, {"rating": ratings, "length": lengths})
