"""Who owns which record: by class or by column."""

from dataclasses import replace

import numpy as np
import pytest

from ownerwise.data import assign
from tools.data_tools import assert_usable, data_set, problems


class TestByClass:
    def test_budgets_follow_the_classes(self):
        data = data_set([30, 20, 10])
        given = assign.by_class(data, (5, 4, 3))  # setting CA
        owners = assert_usable(given, data)
        assert owners.ids.tolist() == ["a", "b", "c"]
        assert owners.epsilon.tolist() == [5, 4, 3]
        assert owners.records.tolist() == [30, 20, 10]
        assert (given.record_owner == np.array(data.classes)[data.train.targets]).all()
        assert given.groups(data.test).tolist() == ["a", "a", "b", "b", "c", "c"]
        assert given.group_budgets == {"a": 5, "b": 4, "c": 3}

    def test_evenly(self):
        assert assign.evenly(0.5, 5, 10) == (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)  # CM
        assert assign.evenly(6, 15, 10) == tuple(range(6, 16))  # CL
        assert assign.evenly(1, 10, 100)[-1] == 10  # CH

    def test_several_classes(self):
        data = data_set([10] * 4)
        halves = {"low": ("a", "b"), "high": ("d", "c")}
        given = assign.by_classes(data, halves, {"high": 1, "low": 0.1})  # setting MN
        owners = assert_usable(given, data)
        assert owners.records.tolist() == [20, 20]
        assert given.epsilon == {"low": 0.1, "high": 1}
        assert given.groups(data.test).tolist() == ["low"] * 4 + ["high"] * 4

    def test_all_problems_of_classes(self):
        data = data_set([5] * 4)
        call = lambda: assign.by_classes(data, {"u": "aab", "v": "bz"}, (1, 2))  # noqa: E731
        found = problems(call, "no class 'z'", "'a' has 2", "'b' has 2", "'c' has 0", "'d' has 0")
        assert len(found) == 5

    @pytest.mark.parametrize(
        ("budgets", "words"),
        [
            ((1, 2), ("2 budgets for 3",)),
            (
                {"a": 1, "b": 1, "z": 2},
                ("no budget for 'c'", "budget given for the unknown name 'z'"),
            ),
            ((1, 0, -2), ("b (0), c (-2)",)),
            ((1, float("nan"), 1), ("b (nan)",)),
        ],
    )
    def test_all_problems_of_budgets(self, budgets, words):
        problems(lambda: assign.by_class(data_set([2, 2, 2]), budgets), *words)


class TestByColumn:
    def test_owners_and_groups(self):
        data = data_set([3, 3])
        subject = np.arange(6) // 2
        data = replace(
            data,
            train=replace(data.train, columns={"subject": subject}),
            test=replace(data.test, columns={"subject": np.array([2, 2, 0, 1])}),
        )
        given = assign.by_column(data, "subject", {0: 1.0, 1: 2.0, 2: 3.0})
        owners = assert_usable(given, data)
        assert owners.ids.tolist() == [0, 1, 2]
        assert given.groups(data.test).tolist() == ["2", "2", "0", "1"]
        assert given.group_budgets == {"0": 1.0, "1": 2.0, "2": 3.0}

    def test_no_such_column(self):
        problems(lambda: assign.by_column(data_set([3]), "subject", {}), "'subject'", "no columns")
