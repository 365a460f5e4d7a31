"""What tests of data sets share: refusals, files with some content, and labelled records."""

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.data import DataSet, Records
from ownerwise.errors import OwnerwiseError


def problems(call, *words):
    """Return the problems that a call reports; each word must stand in one of them."""
    with pytest.raises(OwnerwiseError) as error:
        call()
    for word in words:
        assert word in str(error.value)
    return error.value.problems


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def data_set(counts, test=2):
    """So many training records of each class, in mixed order, and some test records of each."""
    classes = tuple("abcdefghijklmnopqrst"[: len(counts)])
    targets = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    test_targets = np.repeat(np.arange(len(counts)), test)
    make = lambda labels: Records(np.zeros((len(labels), 1), np.float32), labels)  # noqa: E731
    return DataSet("x", make(targets), make(test_targets), classes)


def assert_usable(given, data):
    """The contract with Owners and with evaluation by groups."""
    owners = ow.Owners(given.record_owner, given.epsilon, 1e-9)
    assert len(given.record_owner) == len(data.train)
    assert owners.total_records == len(data.train)
    groups = given.groups(data.test)
    assert groups.dtype.kind == "U"
    assert set(groups) <= set(given.group_budgets)
    return owners
