"""Splits of published files. Those of tables that may change: tests/attacks/test_splits.py."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.data.splits import positional_split


class TestPositionalSplit:
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 6))
    def test_each_class_gives_its_share(self, targets, every):
        targets = np.array(targets)
        test = positional_split(targets, every=every)
        for label in np.unique(targets):
            own = test[targets == label]
            assert own.sum() == len(own) // every
            assert own[every - 1 :: every].all()

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=60))
    def test_groups_stay_together(self, pairs):
        targets, groups = np.array(pairs).T
        test = positional_split(targets, groups)
        assert not set(groups[test]) & set(groups[~test])

    def test_order_of_appearance_decides(self):
        groups = np.array(["z", "y", "x", "w", "v", "z"])
        assert positional_split(np.zeros(6, dtype=np.int64), groups).tolist() == [0, 0, 0, 0, 1, 0]
