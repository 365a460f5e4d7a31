"""What `ownerwise init` leaves to be filled in, and the check that it has been filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ownerwise.errors import name_some

TODO = "TODO"
"""The value of a key that the user has to replace."""


class Blank(NamedTuple):
    """What to fill in for a key, and a valid value with which the other keys are checked."""

    words: str
    stand_in: Any


BLANKS: dict[str, Blank] = {
    "data.target": Blank("the column with the class of each record", "target"),
    "data.owner": Blank("the column that says whose record it is", "owner"),
    "data.classes": Blank("all classes that the target column may hold", ["0", "1"]),
    "owners.budgets": Blank("a CSV file with the columns owner and epsilon", "budgets.csv"),
    "plan.unit": Blank(
        '"record", or "owner" to protect people with all of their records', "record"
    ),
    "plan.batch_size": Blank(
        "the average number of records (owners, if they are the unit) per step", 1
    ),
}
COLUMN = Blank(
    'a range [lowest, highest], a list of categories ["a", "b"], or a table such as { range = '
    '[30, 250], unit = "kg" }, { categories = [1, 2, 3] } or { dates = ["1920-01-01", '
    '"2026-12-31"] }; or delete the line to leave the column out',
    [0, 1],
)


def fill(sections: Mapping[str, dict[str, Any]]) -> list[str]:
    """Replace what is still to be filled in by valid values; return a problem for each of them."""
    problems = []
    for section, values in sections.items():
        for key, value in list(values.items()):
            place = f"{section}.{key}"
            if place == "data.features" and isinstance(value, Mapping):
                problems += _fill_columns(values, value)
            elif _is_open(value):
                blank = BLANKS.get(place, Blank("a value", None))
                values[key] = blank.stand_in
                problems.append(f'{place} is still "{TODO}"; fill in {blank.words}')
                if blank.stand_in is None:
                    del values[key]
    return problems


def _fill_columns(values: dict[str, Any], columns: Mapping[str, Any]) -> list[str]:
    names = [name for name, said in columns.items() if _is_open(said)]
    values["features"] = {
        name: COLUMN.stand_in if name in names else said for name, said in columns.items()
    }
    if not names:
        return []
    listed = name_some(names, repr, shown=40)
    return [
        f'data.features: {listed} {"is" if len(names) == 1 else "are"} still "{TODO}"; declare for '
        f"each column, from public knowledge, {COLUMN.words}"
    ]


def _is_open(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_open, value.values()))
    return any(map(_is_open, value)) if isinstance(value, list) else value == TODO
