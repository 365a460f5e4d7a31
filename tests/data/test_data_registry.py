"""Data sets by name."""

import numpy as np
import pytest

from ownerwise import data
from ownerwise.data.registry import SOURCES
from tools.made_files import MAKERS, make, problems


@pytest.mark.parametrize("name", [name for name in data.NAMES if name != "digits"])
def test_every_name_loads(root, name):
    loaded = data.load(name, make(name, root), download=False)
    assert loaded.name == name
    assert len(loaded.train)
    assert loaded.test is not None
    assert loaded.form
    assert loaded.not_private == ()
    for records in loaded.parts().values():
        assert records.inputs.dtype in (np.float32, np.int64)
        assert len(records.inputs) == len(records.targets)
        images, labels = records.tensors()
        assert len(images) == len(labels) == len(records)


@pytest.mark.parametrize("name", [name for name in data.NAMES if name != "digits"])
def test_missing_files_are_named(root, name):
    problems(lambda: data.load(name, root, download=False), f"{name}:", "put it into", str(root))


def test_names_are_those_of_the_makers_and_digits():
    assert {*MAKERS, "digits"} == set(data.NAMES)


@pytest.mark.parametrize(
    ("given", "near"),
    [("minst", "mnist"), ("CIFAR-10", "cifar10"), ("fashion-mnist", "fashion_mnist")],
)
def test_unknown_names(given, near):
    problems(lambda: data.load(given), repr(given), f"did you mean {near!r}?")


def test_name_unlike_any_other():
    (problem,) = problems(lambda: data.load("xyzzy"), "'xyzzy'", "mnist")
    assert "did you mean" not in problem


def test_options_are_those_of_the_loader(root):
    problems(lambda: data.load("mnist", scaling="unit"), "no option scaling", "scale")
    make("mnist", root)
    assert data.load("mnist", root, scale="signed").train.inputs.min() < 0


def test_downloads_are_checked():
    """Every file has an address and a SHA-256, and is one that the part is known by."""
    assert set(SOURCES) == set(data.NAMES) - {"digits"}
    for source in SOURCES.values():
        for part in source.parts:
            for item in part.downloads:
                assert len(item.sha256) == 64
                int(item.sha256, 16)
                assert item.urls
                assert all(url.startswith(("https://", "http://")) for url in item.urls)
                assert item.file.split("/")[0] in part.names
