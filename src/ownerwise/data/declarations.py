"""What a caller declares about each column of a table: a range, categories, dates, pictures, text.

Declarations are public knowledge. They can be checked without the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ownerwise.data.cells import day_of
from ownerwise.data.features import Category, Date, Number, Schema
from ownerwise.data.pictures import Pictures
from ownerwise.errors import OwnerwiseError, Problems, known_names, name_some

Declared = (
    tuple[float, float] | Sequence[str] | Number | Category | Date | Pictures
    | Mapping[str, Any] | str | None
)  # fmt: skip
"""The declaration of a column: a range, categories, dates, picture files, "text", or nothing."""

TEXT = "text"
_NUMBER_LIKE = re.compile(r"[-+.,\deE\s]+")
_OPTIONS = {
    "range": ("unit", "decimal", "logarithmic", "missing"),
    "categories": ("missing",),
    "dates": ("format", "missing"),
}
_EXPECTED = (
    "expected a range [low, high], a list of categories (text), dates, picture files, \"text\", or "
    "a table such as { range = [low, high], unit = \"kg\" } or { categories = [1, 2, 3] }"
)  # fmt: skip


def declarations(features: Mapping[str, Any] | Sequence[str]) -> dict[str, Declared]:
    """Return the declaration of each column, with tables turned into objects.

    Raises:
        OwnerwiseError: if there are problems; the message lists all of them.
    """
    if not isinstance(features, Mapping):
        return dict.fromkeys(features)
    problems, result = Problems(), {}
    for name, said in features.items():
        with problems.guard():
            result[name] = _declared(name, said)
    problems.raise_()
    alone = [name for name, said in result.items() if isinstance(said, Pictures) or said == TEXT]
    if len(result) > 1:
        for name in alone:
            kind = "contains texts" if result[name] == TEXT else "names picture files"
            problems.add(f"column {name} {kind}, so it must be the only feature")
    problems.raise_()
    return result


def schema_of(declared: Mapping[str, Declared], missing: Sequence[Any] = ()) -> Schema:
    """Return the schema of a table whose inputs are not pictures or texts.

    `missing` lists codes of missing values in all columns.
    """
    known = (Number, Category, Date)
    columns = (said if isinstance(said, known) else Number(name) for name, said in declared.items())
    return [replace(column, missing=(*column.missing, *missing)) for column in columns]


def _declared(name: str, said: Any) -> Declared:
    """Return the declaration as an object, "text" or None."""
    if said is None or said == TEXT or isinstance(said, Pictures):
        return said
    if isinstance(said, Number | Category | Date):
        found: Any = replace(said, name=name)
    elif isinstance(said, Mapping):
        found = _from_table(name, said)
    elif isinstance(said, str) or not isinstance(said, Sequence) or not len(said):
        raise OwnerwiseError(f"feature {name}: {said!r} was declared; {_EXPECTED}")
    elif all(isinstance(value, str) for value in said):
        found = Category(name, tuple(said))
    elif len(said) == 2 and all(map(_is_number, said)):
        found = Number(name, float(said[0]), float(said[1]))
    else:
        raise OwnerwiseError(f"feature {name}: {said!r} was declared; {_EXPECTED}")
    problems = list(_value_problems(found)) if not isinstance(found, Pictures) else []
    if problems:
        raise OwnerwiseError(problems)
    return found


def _from_table(name: str, said: Mapping[str, Any]) -> Number | Category | Date | Pictures:
    kinds = [kind for kind in _OPTIONS if kind in said]
    if not kinds and said.keys() <= {field.name for field in fields(Pictures)}:
        return Pictures(**said)
    if len(kinds) != 1:
        of_pictures = ", ".join(field.name for field in fields(Pictures))
        raise OwnerwiseError(
            f"feature {name} has the options {name_some(list(said))}; expected one of range, "
            f"categories and dates, or only options for picture files ({of_pictures})"
        )
    kind = kinds[0]
    options = {key: value for key, value in said.items() if key != kind}
    unknown = [key for key in options if key not in _OPTIONS[kind]]
    if unknown:
        raise OwnerwiseError(
            f"feature {name} has the option {unknown[0]}; {known_names(unknown[0], _OPTIONS[kind])}"
        )
    value = said[kind]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise OwnerwiseError(f"feature {name}.{kind} is {value!r}; expected a list")
    if kind == "categories":
        return Category(name, tuple(map(str, value)), **_as_tuple(options))
    if len(value) != 2:
        raise OwnerwiseError(f"feature {name}.{kind} is {value!r}; expected [lowest, highest]")
    if kind == "dates":
        return Date(name, *value, **_as_tuple(options))
    if not all(map(_is_number, value)):
        raise OwnerwiseError(f"feature {name}.range is {value!r}; expected two numbers")
    return Number(name, float(value[0]), float(value[1]), **_as_tuple(options))


def _as_tuple(options: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(options)
    if isinstance(given.get("missing"), list):
        given["missing"] = tuple(given["missing"])
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value_problems(column: Number | Category | Date) -> Iterator[str]:
    name = f"feature {column.name}"
    if not isinstance(column.missing, tuple):
        yield f"{name}.missing is {column.missing!r}; expected a list of codes, such as [-9, 'NA']"
    if isinstance(column, Category):
        if len(set(column.values)) < len(column.values) or not column.values:
            yield f"{name} has the categories {list(column.values)}; expected each of them once"
        return
    if isinstance(column, Date):
        try:
            first, last = day_of(column.first), day_of(column.last)
        except (TypeError, ValueError):
            given = f"{column.first} to {column.last}"
            yield f"{name} has dates {given}; expected two dates such as 1920-01-01"
            return
        if not first < last:
            yield f"{name} has dates {column.first} to {column.last}; expected first < last"
        if not isinstance(column.format, str):
            yield f"{name}.format is {column.format!r}; expected text such as '%d.%m.%Y'"
        return
    if column.decimal not in (".", ","):
        yield f"{name}.decimal is {column.decimal!r}; expected '.' or ','"
    if not isinstance(column.unit, str):
        yield f"{name}.unit is {column.unit!r}; expected text such as 'kg'"
    elif _NUMBER_LIKE.fullmatch(column.unit):
        yield f"{name}.unit is {column.unit!r}, which could be part of a number; expected a unit"
    if not isinstance(column.logarithmic, bool):
        yield f"{name}.logarithmic is {column.logarithmic!r}; expected true or false"
    low, high = column.low, column.high
    if low is not None and high is not None and not low < high:
        yield f"{name} has range {low:g} to {high:g}; expected low < high"
