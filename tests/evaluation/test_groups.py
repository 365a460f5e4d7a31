"""Recall by group, and groups that are too small or too personal to have results of their own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.evaluation.groups import (
    SMALLEST_GROUP,
    group_recalls,
    is_pooled,
    owner_mean,
    pool_groups,
)


def test_group_recalls():
    found = group_recalls([1, 0, 1, 1], [1, 1, 1, 0], ["a", "a", "b", "b"])
    assert found.recalls == {"a": 0.5, "b": 0.5}
    found = group_recalls([1, 0, 1], [1, 1, 1], ["a", "a", "b"])
    assert found.worst == 0.5
    assert found.spread == 0.25
    assert found.balanced == 0.75
    assert found.overall == pytest.approx(2 / 3)


BUDGETS = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 4.0}


def test_small_groups_are_pooled_by_budget_and_large_ones_keep_their_names():
    groups = np.repeat(["a", "b", "c", "d", "x", "y"], [30, 4, 5, 10, 3, 3])
    pooled, classes = pool_groups(groups, BUDGETS, "owner", persons=False)
    names, counts = np.unique(pooled, return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "a": 30, "d": 10, "ε 2 per owner (2 groups)": 9, "others (2 groups)": 6,
    }  # fmt: skip
    assert classes == {"ε 2 per owner (2 groups)": 2.0}


def test_single_persons_are_pooled_whatever_their_size():
    groups = np.repeat(list(BUDGETS), 100)
    pooled, classes = pool_groups(groups, BUDGETS, "record", persons=True)
    assert set(pooled.tolist()) == set(classes)
    assert classes == {
        "ε 1 per record (1 owner)": 1.0,
        "ε 2 per record (2 owners)": 2.0,
        "ε 4 per record (1 owner)": 4.0,
    }


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.booleans())
def test_pooling_loses_no_record_and_splits_no_group(members, persons):
    groups = np.array(members)
    budgets = {str(member): 0.5 + member for member in range(0, 30, 2)}
    pooled, classes = pool_groups(groups, budgets, "record", persons=persons)
    assert len(pooled) == len(groups)
    assert len(classes) <= 8
    for member in set(members):
        assert len(set(pooled[groups == member].tolist())) == 1
    counts = {name: members.count(name) for name in set(members)}
    kept = {name for name in counts if counts[name] >= SMALLEST_GROUP and not persons}
    assert {name for name in map(str, pooled.tolist()) if not is_pooled(name)} == set(
        map(str, kept)
    )


def test_every_owner_counts_equally():
    correct = np.array([True] * 9 + [False])
    found = owner_mean(correct, np.array(["a"] * 9 + ["b"]))
    assert found == {"owners": 2, "owner_accuracy": 0.5}
