"""The data sets of the papers, found by name through entry points."""

import numpy as np
import pytest

from made_files import MAKERS, make
from ownerwise import data
from ownerwise_reproduction.data import SOURCES
from tools.data_tools import problems


@pytest.mark.parametrize("name", MAKERS)
def test_every_name_loads(root, name):
    loaded = data.load(name, make(name, root), download=False)
    assert loaded.name == name
    assert len(loaded.train)
    assert loaded.test is not None
    assert loaded.form
    median = ("the threshold between the classes: the median score of the records",)
    assert loaded.not_private == (median if name == "parkinsons_telemonitoring" else ())
    for records in loaded.parts().values():
        assert records.inputs.dtype in (np.float32, np.int64)
        assert len(records.inputs) == len(records.targets)
        images, labels = records.tensors()
        assert len(images) == len(labels) == len(records)


@pytest.mark.parametrize("name", MAKERS)
def test_missing_files_are_named(root, name):
    problems(lambda: data.load(name, root, download=False), f"{name}:", "put it into", str(root))


def test_every_data_set_of_the_papers_is_registered():
    assert set(MAKERS) == set(SOURCES)
    assert set(SOURCES) <= set(data.LOADERS)


@pytest.mark.parametrize(
    ("given", "near"),
    [("minst", "mnist"), ("CIFAR-10", "cifar10"), ("fashion-mnist", "fashion_mnist")],
)
def test_an_unknown_name_is_answered_with_the_nearest(given, near):
    problems(lambda: data.load(given), repr(given), f"did you mean {near!r}?")


def test_a_name_unlike_any_other_gets_no_suggestion():
    (problem,) = problems(lambda: data.load("xyzzy"), "'xyzzy'", "mnist")
    assert "did you mean" not in problem


def test_options_are_those_of_the_loader(root):
    problems(lambda: data.load("mnist", scaling="unit"), "no option scaling", "scale")
    make("mnist", root)
    assert data.load("mnist", root, scale="signed").train.inputs.min() < 0


def test_every_download_has_an_address_and_a_digest():
    for source in SOURCES.values():
        for part in source.parts:
            for item in part.downloads:
                assert len(item.sha256) == 64
                int(item.sha256, 16)
                assert item.urls
                assert all(url.startswith(("https://", "http://")) for url in item.urls)
                assert item.file.split("/")[0] in part.names
