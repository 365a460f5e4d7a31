"""Cells as hospitals write them: units, decimal commas, dates, codes, missing values."""

from __future__ import annotations

from datetime import date, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.data import Category, Date, Number
from ownerwise.data.cells import code_of, day_of, missing_test, number_of
from ownerwise.data.features import class_of, encode
from tools.data_tools import problems


def inputs(cells, feature, **options):
    return encode({feature.name: cells}, [feature], **options).inputs


@pytest.mark.parametrize(
    ("cell", "options", "number"),
    [
        ("82", {}, 82), (" 82.5 ", {}, 82.5), (7, {}, 7), (np.float32(1.5), {}, 1.5),
        ("82 kg", {"unit": "kg"}, 82), ("82kg", {"unit": "kg"}, 82), ("82", {"unit": "kg"}, 82),
        ("37,5 °C", {"unit": "°C", "decimal": ","}, 37.5), ("1,5", {"decimal": ","}, 1.5),
        ("5.1 10^9/l", {"unit": "10^9/l"}, 5.1), ("-3e-2", {}, -0.03), ("20%", {"unit": "%"}, 20),
    ],
)  # fmt: skip
def test_numbers(cell, options, number):
    assert number_of(cell, **options) == number


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("180 lb", {"unit": "kg"}), ("82 kg", {}), ("1,5", {}), ("1.234,5", {"decimal": ","}),
        ("1.5", {"decimal": ","}), ("<5", {}), ("1 000", {}), ("0_5", {}), ("82 kg kg", {"unit":
        "kg"}), (b"5", {}), ("kg", {"unit": "kg"}), ("٣", {}),
    ],
)  # fmt: skip
def test_cells_that_could_mean_something_else_are_refused(cell, options):
    with pytest.raises((TypeError, ValueError)):
        number_of(cell, **options)


@pytest.mark.parametrize("cell", [1, 1.0, "1", "1.0", "1.00", " 1 ", np.int8(1), np.float32(1)])
def test_a_code_is_the_same_however_it_is_written(cell):
    assert code_of(cell) == "1"


def test_codes_that_differ():
    assert code_of("01") == "01"
    assert code_of("1.5") == "1.5"
    assert code_of("-1.0") == "-1"
    assert code_of("A1.0") == "A1.0"
    assert code_of("١.0") != "1"


@given(st.dates(date(1900, 1, 1), date(2100, 1, 1)))
def test_dates_in_any_form_are_the_same_day(day):
    number = day_of(day)
    assert number == (day - date(1970, 1, 1)).days
    assert day_of(day.isoformat()) == number
    assert day_of(day.strftime("%d.%m.%Y"), "%d.%m.%Y") == number
    assert day_of(np.datetime64(day)) == number
    assert day_of(datetime(day.year, day.month, day.day, 12)) == number + 0.5


def test_a_time_zone_counts():
    assert day_of("1970-01-02T01:00:00+01:00") == 1.0


@pytest.mark.parametrize("cell", ["31.12.2020", "2020-13-01", "soon", 5, None])
def test_what_is_no_date(cell):
    with pytest.raises((TypeError, ValueError)):
        day_of(cell)


def test_missing_codes():
    is_missing = missing_test([-9, "NA"])
    missing = ["", "?", None, "NA", "-9", -9, -9.0, "-9.0", float("nan"), np.float64(-9)]
    missing += [np.float32("nan"), np.datetime64("NaT")]
    assert all(map(is_missing, missing))
    assert not any(map(is_missing, ["na", "9", 0, "-99", "N A"]))


def test_units_and_missing_codes_in_a_column():
    weight = Number("weight", 0, 200, unit="kg", missing=("NA",))
    assert inputs(["100 kg", "200", "NA", "", "0kg"], weight)[:, 0].tolist() == [0, 1, 0, 0, -1]
    array = Number("x", 0, 10, missing=(-9, "NA"))
    assert inputs(np.array([10.0, -9.0, 0.0]), array)[:, 0].tolist() == [1, 0, -1]
    assert inputs(np.array([10, -9, 0]), array)[:, 0].tolist() == [1, 0, -1]


def test_a_unit_that_starts_with_a_digit_needs_a_space():
    assert number_of("5.1 10^9/l", unit="10^9/l") == 5.1
    with pytest.raises(ValueError, match="10"):
        number_of("5.110^9/l", unit="10^9/l")


def test_dates_in_a_column():
    birth = Date("birth", "1920-01-01", date(2020, 1, 1), "%d.%m.%Y")
    found = inputs(["01.01.2020", "01.01.1920", "", "01.01.1850"], birth)[:, 0]
    assert found.tolist() == [1, -1, 0, -1]
    message = "no date in record 0, record 2; expected one in every record, written as %d.%m.%Y"
    problems(lambda: inputs(["2020-01-01", "", "5"], birth), message)


def test_codes_match_numeric_categories():
    """Also if missing cells have turned whole numbers into "1.0"."""
    stage = Category("stage", ("1", "2"))
    for cells in (["1.0", "2.0"], ["1", "2"], np.array([1, 2]), np.array([1.0, 2.0]), [1, 2.0]):
        assert inputs(cells, stage).tolist() == [[1, 0], [0, 1]]
    assert inputs(np.array([np.nan, 2.0]), stage).tolist() == [[0, 0], [0, 1]]
    problems(lambda: inputs(["01"], stage), "not in the declared list")


def test_categories_that_only_differ_in_how_they_are_written_stay_apart():
    both = Category("ward", ("1", "1.0"))
    assert inputs(["1"], both).tolist() == [[1, 0]]


def test_classes_match_as_codes():
    assert class_of(["1.0", "0", "1"], ("0", "1"), "column y").tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("feature", "cells"),
    [
        (Number("x", 0, 10, unit="kg"), ["1", "2 kg", "", "1e300", "7"]),
        (Category("x", ("1", "2")), ["1", "2.0", "", "2", "1.0"]),
        (Date("x", "2000-01-01", "2030-01-01"), ["2001-01-01", "", "1900-01-01", "2020-02-02"]),
    ],
)
@pytest.mark.parametrize("scale", ["ranges", "released"])
def test_a_cell_never_depends_on_the_others(feature, cells, scale):
    """Every record removed in turn."""
    if isinstance(feature, Category) and scale == "released":
        pytest.skip("no statistics")
    whole = inputs(cells, feature, scale=scale)
    for out in range(len(cells)):
        left = [cell for at, cell in enumerate(cells) if at != out]
        assert np.array_equal(inputs(left, feature, scale=scale), np.delete(whole, out, axis=0))


def test_released_has_numbers_first_then_what_is_missing():
    cells = {"ward": ["a", "b"], "age": ["50", ""], "day": ["", "2020-01-01"]}
    schema = [
        Category("ward", ("a", "b")), Number("age", 0, 100), Date("day", "2000-01-01", "2020-01-01")
    ]  # fmt: skip
    encoded = encode(cells, schema, "released")
    assert encoded.names == ("age", "day", "age missing", "day missing", "ward=a", "ward=b")
    assert encoded.inputs.tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]]
    assert encoded.numbers == 2
    assert encoded.not_private == ()
    assert encode(cells, schema).numbers == 0


def test_released_needs_ranges_and_numbers():
    problems(lambda: inputs(["1"], Number("x"), scale="released"), "has no declared range")
    categories = Category("x", ("a", "b"))
    problems(lambda: inputs(["a"], categories, scale="released"), "no column of numbers")


def test_messages_say_how_to_declare_what_was_found():
    problems(lambda: inputs(["82 kg"], Number("x")), "x = { range = [low, high], unit = 'kg' }")
    problems(lambda: inputs(["1,5"], Number("x", 0, 9)), "decimal = ','")
