"""Tables as numbers, by a public schema."""

import numpy as np
import pytest

from ownerwise.data import (
    Category,
    Number,
)
from ownerwise.data.features import (
    encode,
)
from ownerwise.errors import PrivacyWarning
from tools.data_tools import problems


def numbers(column, feature, **options):
    return encode({feature.name: column}, [feature], **options).inputs[:, 0].tolist()


class TestRanges:
    def test_low_is_minus_one_and_high_is_one(self):
        cells = ["0", "50", "100", "-7", "1e9", "?", "", None]
        expected = [-1, 0, 1, -1, 1, 0, 0, 0]
        assert numbers(cells, Number("x", 0, 100)) == expected

    def test_logarithmic(self):
        edge = np.e**2 - 1
        feature = Number("x", -edge, edge, logarithmic=True)
        assert numbers([edge, np.e - 1, 0, 1 - np.e], feature) == pytest.approx([1, 0.5, 0, -0.5])

    def test_without_a_range(self):
        assert numbers(["3.5", "-2"], Number("x")) == [3.5, -2]
        problems(lambda: numbers(["3", "?"], Number("x")), "column x", "missing in record 1")

    def test_one_record_at_a_time(self):
        """With declared ranges no record's inputs depend on another record."""
        feature = Number("x", 0, 10)
        assert numbers([3, 4], feature)[0] == numbers([3, 9999], feature)[0]


class TestStatistics:
    def test_of_the_training_records_alone(self):
        cells, train = [1.0, 3.0, 100.0], np.array([True, True, False])
        with pytest.warns(PrivacyWarning, match="NOT private"):
            assert numbers(cells, Number("x"), scale="statistics", train=train) == [-1, 1, 98]

    def test_constant_and_missing(self):
        with pytest.warns(PrivacyWarning):
            assert numbers(["5", "5", "?"], Number("x"), scale="statistics") == [0, 0, 0]


def test_categories():
    encoded = encode({"ward": ["b", "a", "?"]}, [Category("ward", ("a", "b"))])
    assert encoded.inputs.tolist() == [[0, 1], [1, 0], [0, 0]]
    assert encoded.names == ("ward=a", "ward=b")
    assert encoded.inputs.dtype == np.float32


def test_all_problems_are_listed():
    cells = {"age": ["old", "inf", "3"], "ward": ["c", "a", "d"]}
    schema = [Number("age", 0, 100), Category("ward", ("a", "b"))]
    found = problems(lambda: encode(cells, schema))
    assert len(found) == 2
    assert "no finite number in record 0, record 1" in found[0]
    assert "the value in record 0, record 2 is not in the declared list 'a', 'b'" in found[1]


def test_numbers_are_read_as_they_are_for_budgets():
    """Python reads "1_0" as 10, and digits of other scripts."""
    problems(
        lambda: encode({"x": ["1_0", "3", "٣"]}, [Number("x", 0, 10)]),
        "no finite number in record 0, record 2",
    )


def test_infinite_number_in_an_array():
    problems(
        lambda: encode({"x": np.array([1, np.inf])}, [Number("x", 0, 1)]), "number in record 1;"
    )


def test_other_scale():
    problems(lambda: encode({}, [], "standard"), "'standard'", "'ranges'")
