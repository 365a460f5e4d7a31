"""What every loader returns."""

import numpy as np
import pytest

from ownerwise.data import DataSet, Records
from tools.data_tools import problems


def records(targets, **columns):
    targets = np.array(targets, dtype=np.int64)
    inputs = np.arange(2.0 * len(targets), dtype=np.float32).reshape(-1, 2)
    return Records(inputs, targets, columns)


class TestRecords:
    def test_take(self):
        some = records([0, 1, 2], sex=np.array(["f", "m", "f"])).take(np.array([2, 0]))
        assert some.targets.tolist() == [2, 0]
        assert some.inputs.tolist() == [[4, 5], [0, 1]]
        assert some.columns["sex"].tolist() == ["f", "f"]

    def test_tensors_share_the_memory(self):
        some = records([0, 1])
        inputs, targets = some.tensors()
        inputs[0, 0] = 7
        assert some.inputs[0, 0] == 7
        assert targets.tolist() == [0, 1]

    def test_all_misfits_are_listed(self):
        found = problems(lambda: Records(np.zeros((3, 2)), np.zeros(2), {"a": np.zeros(4)}))
        assert len(found) == 2
        assert "inputs 3, targets 2, column a 4" in found[0]
        assert "float64" in found[1]

    def test_repr_shows_no_record(self):
        assert repr(records([0, 1], sex=np.array(["f", "m"]))) == (
            "Records(float32 [2], columns sex)"
        )


class TestDataSet:
    def test_targets_must_be_classes(self):
        found = problems(lambda: DataSet("x", records([0, 2]), records([-1]), ("a", "b")))
        assert len(found) == 2
        assert "x, train: the target of record 1 is not a position in the list" in found[0]

    def test_only(self):
        whole = DataSet("x", records([0, 1, 2, 1]), records([2, 0]), ("a", "b", "c"))
        some = whole.only(["c", "b"])
        assert some.classes == ("c", "b")
        assert some.train.targets.tolist() == [1, 0, 1]
        assert some.train.inputs[:, 0].tolist() == [2, 4, 6]
        assert some.test.targets.tolist() == [0]

    @pytest.mark.parametrize("classes", [["d"], ["a", "a"], []])
    def test_only_of_classes_there_are(self, classes):
        problems(lambda: DataSet("x", records([0]), None, ("a", "b")).only(classes))
