"""Declarations of columns, in Python and as in a configuration file."""

from __future__ import annotations

from datetime import date

import pytest

from ownerwise.data import Category, Date, Number, Pictures
from ownerwise.data.declarations import declarations, schema_of
from tools.data_tools import problems


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([0, 110], Number("x", 0, 110)),
        ((0.5, 1), Number("x", 0.5, 1)),
        (["a", "b"], Category("x", ("a", "b"))),
        (["0", "1"], Category("x", ("0", "1"))),
        ({"categories": [0, 1, 2]}, Category("x", ("0", "1", "2"))),
        ({"categories": ["a"], "missing": ["-"]}, Category("x", ("a",), ("-",))),
        ({"range": [0, 9], "unit": "kg"}, Number("x", 0, 9, unit="kg")),
        (
            {"range": [0, 9], "decimal": ",", "logarithmic": True, "missing": [-9]},
            Number("x", 0, 9, True, decimal=",", missing=(-9,)),
        ),
        ({"dates": ["1920-01-01", date(2026, 1, 1)]}, Date("x", "1920-01-01", date(2026, 1, 1))),
        (
            {"dates": ["1920-01-01", "2026-01-01"], "format": "%d.%m.%Y"},
            Date("x", "1920-01-01", "2026-01-01", "%d.%m.%Y"),
        ),
        (Number("other", 0, 1), Number("x", 0, 1)),
        ({"folder": "faces"}, Pictures("faces")),
        (None, None),
        ("text", "text"),
    ],
)
def test_what_can_be_declared(said, found):
    assert declarations({"x": said}) == {"x": found}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([0, 1, 2], "[0, 1, 2] was declared; expected a range"),
        ("number", "'number' was declared"),
        ([], "[] was declared"),
        ({"range": [0]}, "expected [lowest, highest]"),
        ({"range": ["a", "b"]}, "expected two numbers"),
        ({"range": 3}, "feature x.range is 3; expected a list"),
        ({"range": [3, 1]}, "range 3 to 1; expected low < high"),
        ({"range": [0, 1], "units": "kg"}, "the option units; did you mean 'unit'"),
        ({"range": [0, 1], "categories": ["a"]}, "expected one of range, categories and dates"),
        ({"range": [0, 1], "decimal": ";"}, "decimal is ';'; expected '.' or ','"),
        ({"range": [0, 1], "unit": 3}, "unit is 3"),
        ({"range": [0, 1], "unit": "5"}, "could be part of a number"),
        ({"range": [0, 1], "unit": "e5"}, "could be part of a number"),
        ({"range": [0, 1], "logarithmic": "yes"}, "logarithmic is 'yes'"),
        ({"range": [0, 1], "missing": "NA"}, "missing is 'NA'; expected a list of codes"),
        ({"categories": ["a", "a"]}, "expected each of them once"),
        ({"dates": ["1920", "soon"]}, "expected two dates such as"),
        ({"dates": ["2020-01-01", "1920-01-01"]}, "expected first < last"),
        ({"dates": ["1920-01-01", "2020-01-01"], "format": 3}, "format is 3"),
    ],
)
def test_what_cannot(said, words):
    problems(lambda: declarations({"x": said}), words)


def test_all_problems_are_listed():
    found = problems(lambda: declarations({"x": [1, 0], "y": "z", "fine": [0, 1], "w": {"a": 1}}))
    assert len(found) == 3


def test_missing_codes_of_the_whole_table():
    declared = declarations({"x": {"range": [0, 1], "missing": ["-"]}, "y": None})
    assert schema_of(declared, ["NA"]) == [
        Number("x", 0, 1, missing=("-", "NA")), Number("y", missing=("NA",))
    ]  # fmt: skip
