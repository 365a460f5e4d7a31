"""The digits that come with scikit-learn."""

import sys

import numpy as np

from ownerwise.data import load_digits
from tools.data_tools import problems


def test_the_split_is_fixed():
    loaded = load_digits()
    assert (len(loaded.train), len(loaded.test)) == (1442, 355)
    assert loaded.train.inputs.shape == (1442, 1, 8, 8)
    assert (loaded.train.inputs.min(), loaded.train.inputs.max()) == (0, 1)
    counts = np.bincount(loaded.train.targets), np.bincount(loaded.test.targets)
    assert counts[0].tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert (counts[1] == (counts[0] + counts[1]) // 5).all()


def test_the_scale_is_one_that_is_known():
    assert load_digits(scale="signed").train.inputs.min() == -1
    problems(lambda: load_digits(scale="wide"), "digits: scale 'wide'", "'unit', 'signed'")


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    problems(load_digits, "sklearn", "pip install 'ownerwise[sklearn]'")
