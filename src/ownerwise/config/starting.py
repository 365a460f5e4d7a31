"""A commented configuration to start from, written for the columns of a table.

Guarantee: the text depends on the names of the columns alone. Of a CSV file, only the first line is
read; of a Parquet file, only its schema. No range, category or count is taken from the records.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

from ownerwise.config.placeholders import BLANKS, TODO
from ownerwise.data.reading import reading, unknown_type
from ownerwise.errors import OwnerwiseError, known_names, name_some, require
from ownerwise.owners import PARQUET, csv_rows

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER_LIKE = re.compile(r"[-+]?[\d.,][\d.,:/\s%eE+-]*|[?]?")
_OWNERS = (
    "owner",
    "patient",
    "patient_id",
    "subject",
    "subject#",
    "subject_id",
    "person",
    "client",
)
_HINTS = {
    "age": "[0, 110]",
    "bmi": "[10, 70]",
    "height": '{ range = [50, 230], unit = "cm" }',
    "weight": '{ range = [2, 300], unit = "kg" }',
    "pulse": "[20, 250]",
    "sex": '["f", "m"], or { categories = [0, 1] } for numbers',
    "gender": '["f", "m"], or { categories = [0, 1] } for numbers',
    "date": '{ dates = ["1920-01-01", "2026-12-31"] }',
    "birth": '{ dates = ["1920-01-01", "2026-12-31"] }',
    "temperature": "[25, 45]",
}
"""Examples for columns with usual names, from general knowledge; written as comments only."""

_TEXT = """\
# A configuration for {table}: run `ownerwise train {name}` when it is complete.
#
# Only the names of the columns were read from the table; no row was. Replace every "{todo}" from
# public knowledge: a data dictionary, a form, the range of a device. Values taken from the records
# (their smallest and largest value, the categories that occur) would not be private.
# The page "Configuration" of the documentation lists all keys.

[data]
file = {file}
target = {target}\t# {words[target]}
owner = {owner}\t# {words[owner]}
classes = ["{todo}"]\t# {words[classes]}
# missing = ["NA", -9]\t# codes of missing values, besides empty cells and "?"

# The inputs: for each column, a range or all categories. Delete the lines of columns that are not
# inputs, such as the target.
#   age = [0, 110]                                    a range, wide enough for anyone
#   weight = {{ range = [2, 300], unit = "kg" }}        cells such as "82 kg"
#   dose = {{ range = [0, 50], decimal = "," }}         cells such as "1,5"
#   ward = ["day", "night", "emergency"]              categories
#   stage = {{ categories = [1, 2, 3, 4] }}             codes given as numbers
#   admitted = {{ dates = ["2010-01-01", "2026-12-31"], format = "%d.%m.%Y" }}
[data.features]
{columns}

[owners]
budgets = "{todo}"\t# {words[budgets]}
delta = 1e-5\t# well below 1 / number of people

[plan]
unit = "{todo}"\t# {words[unit]}
method = "sample"\t# each owner's budget becomes a sampling rate
steps = 200
batch_size = "{todo}"\t# {words[batch_size]}
# statistics = {{ share = 0.05 }}\t# scale by means and deviations, for 5% of the strictest budget

[model]
name = "mlp"
hidden = [16]

[training]
lr = 0.5

# [weights]\t# more weight for the records that the model serves worst
# kind = "ino"
"""
_COMMENTS_AT = 32


def column_names(path: Path) -> list[str]:
    """Return the names of a table's columns; no row is read."""
    if not path.is_file():
        raise OwnerwiseError(f"no file {path}; expected a table: .csv or .parquet")
    kind = path.suffix.lower()
    if kind in PARQUET:
        parquet = require("pyarrow.parquet", "ownerwise[table]", "a Parquet file")
        return list(parquet.read_schema(path).names)
    if kind != ".csv":
        raise unknown_type(path, ".csv or .parquet")
    return _header(path)


def _header(path: Path) -> list[str]:
    """Return the cells of the first line, which must be names."""
    with path.open("rb") as file:
        line = file.readline()
    with reading(path, "CSV"):
        first = line.decode("utf-8-sig")
    _, names = next(
        iter(csv_rows(io.StringIO(first, newline=""), path, f"{path} is empty (no rows)"))
    )
    doubtful = sum(bool(_NUMBER_LIKE.fullmatch(name)) for name in names)
    if doubtful or len(set(names)) < len(names):
        why = "a name twice" if not doubtful else "numbers, dates or empty cells"
        raise OwnerwiseError(
            f"the first line of {path.name} contains {why}, so it may be a record instead of the "
            "names of the columns. Nothing was written. Add a first line with the names"
        )
    return names


def starting_config(
    path: Path,
    output: Path,
    target: str | None = None,
    owner: str | None = None,
) -> str:
    """Return the text of a configuration for a table.

    Args:
        path: the table.
        output: the configuration's file, which names the table by its relative path.
        target, owner: the columns with the class and the owner of each record; an owner column
            with a usual name is found by its name.
    """
    names = column_names(path)
    unknown = [
        f"{path.name} has no column {given!r}; {known_names(given, names)}"
        for given in (target, owner)
        if given is not None and given not in names
    ]
    if unknown:
        raise OwnerwiseError(unknown)
    if owner is None:
        found = [column for column in names if column.lower() in _OWNERS and column != target]
        owner = found[0] if len(found) == 1 else None
    inputs = [column for column in names if column not in (target, owner)]
    if not inputs:
        raise OwnerwiseError(f"{path.name} has the columns {name_some(names)}; none is an input")
    text = _TEXT.format(
        todo=TODO,
        file=_quoted(Path(os.path.relpath(path.resolve(), output.resolve().parent)).as_posix()),
        table=path.name,
        name=output.name,
        target=_quoted(target or TODO),
        owner=_quoted(owner or TODO),
        words={place.partition(".")[2]: blank.words for place, blank in BLANKS.items()},
        columns="\n".join(map(_column, inputs)),
    )
    return "".join(f"{_aligned(line)}\n" for line in text.splitlines())


def _aligned(line: str) -> str:
    """Return a line whose comment, after a tab, starts in a fixed column."""
    code, tab, comment = line.partition("\t")
    return f"{code:<{_COMMENTS_AT}}  {comment}" if tab else line


def _column(name: str) -> str:
    key = name if _BARE.fullmatch(name) else _quoted(name)
    hint = next((_HINTS[word] for word in re.split(r"[\W_]+", name.lower()) if word in _HINTS), "")
    return f'{key} = "{TODO}"' + (f"\t# such as {hint}" if hint else "")


def _quoted(text: str) -> str:
    """Return text as a TOML string, whose escapes are those of JSON."""
    return json.dumps(text).replace("\x7f", "\\u007f")
