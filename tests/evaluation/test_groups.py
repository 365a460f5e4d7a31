import pytest

from ownerwise.evaluation.groups import group_recalls


def test_group_recalls():
    found = group_recalls([1, 0, 1, 1], [1, 1, 1, 0], ["a", "a", "b", "b"])
    assert found.recalls == {"a": 0.5, "b": 0.5}
    found = group_recalls([1, 0, 1], [1, 1, 1], ["a", "a", "b"])
    assert found.worst == 0.5
    assert found.spread == 0.25
    assert found.balanced == 0.75
    assert found.overall == pytest.approx(2 / 3)
