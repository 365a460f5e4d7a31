"""Load data sets from your own tables, with a column that names the owner of each record."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.data.cells import MISSING
from ownerwise.data.declarations import TEXT, Declared, declarations, schema_of
from ownerwise.data.features import Schema, class_of, encode, make_table, record
from ownerwise.data.pictures import Pictures
from ownerwise.data.reading import by_column, read_arrays, read_rows, reading, unknown_type
from ownerwise.data.records import DataSet, Records
from ownerwise.data.splits import TEST_SHARE, hold_out, split_by_problems
from ownerwise.data.targets import numeric_targets, range_problems
from ownerwise.errors import OwnerwiseError, PrivacyWarning, Problems, did_you_mean, name_some
from ownerwise.owners import HEADER_ALONE, PARQUET, as_array, as_ids, parquet_columns, text_ids
from ownerwise.wording import name_of


def load_table(
    path: str | os.PathLike,
    *,
    target: str,
    owner: str | None = None,
    features: Mapping[str, Declared] | Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    target_range: tuple[float, float] | None = None,
    missing: Sequence[Any] = (),
    columns: Sequence[str] = (),
    scale: str = "ranges",
    test_share: float | None = TEST_SHARE,
    split_by: str = "record",
) -> DataSet:
    """Return the records in a CSV, Parquet or NumPy (.npz) file, or in an attribute list (.txt).

    Args:
        path: a file with one row per record and named columns. In a .npz file each array is a
            column; one array with two or more dimensions may be used directly as the inputs (floats
            become float32, integers int64). A .txt file is an attribute list in CelebA's format:
            the number of rows, the names, then the rows; its first column is called `file`.
        target: the column with the class of each record, or its number (`target_range`).
        owner: the column with the id of each record's owner; it becomes the column `owner`, for use
            in `Owners(data.train.columns["owner"], {id: epsilon})`.
        features: the columns that become inputs; by default, all columns not used for anything
            else. A mapping also declares, from public knowledge, each column's range (low, high) or
            its list of categories: ranges are scaled to [-1, 1], and categories become 0/1 inputs.
            `Number`, `Category` and `Date`, or mappings of their options, also declare units,
            decimal commas, formats and codes of missing values ({"range": (30, 250), "unit": "kg",
            "missing": (-9,)}, {"categories": (1, 2, 3)}, {"dates": ("1920-01-01", "2026-01-01")}).
            None declares a column of numbers that are used unchanged. `Pictures(...)`, or a mapping
            of its options, declares a column that names picture files, which are then the only
            inputs. "text" declares a column of texts, which are then the only inputs, for a feature
            extractor such as `MiniLM`; a missing text becomes an empty one.
        classes: the classes, in the order of their targets. By default, the distinct values in the
            records are used; the list itself is then NOT private.
        target_range: the public range (low, high) of a numeric target, for a regression; the
            targets are then numbers, unchanged (`RegressionLoss` scales them). Leave out `classes`.
        missing: codes of missing values in all inputs, such as ["NA", -9], besides "", "?", None.
        columns: additional columns to keep alongside the inputs.
        scale: "ranges", "released" (standardised by statistics that the plan pays for, see
            `ColumnStatistics`), "statistics" (of the training records: NOT private) or "none".
        test_share: probability that a record becomes a test record, or None for no test set. Each
            record is assigned by a public hash of its row, independently of all other rows (see
            `splits`): rows with equal cells stay together, and the fraction of test records is
            close to `test_share`.
        split_by: "record", or "owner" to hold out whole owners by a public hash of their ids, so
            that no owner is on both sides. Choose "owner" for a plan with unit="owner".

    Example:
        >>> ranges = {"age": (0, 110), "ward": ["day", "night", "emergency"]}
        >>> data = load_table("examples/visits.csv", target="outcome", owner="clinic",
        ...                   features=ranges, classes=["home", "admitted"])
        >>> data.classes, len(data.features)
        (('home', 'admitted'), 4)
    """
    path = Path(path)
    cells = _read(path)
    named = {"target": target, "owner": owner} | {f"columns {name}": name for name in columns}
    others = [name for name in cells if name not in named.values()]
    chosen = declarations(others if features is None else features)
    named |= {f"features {name}": name for name in chosen}
    problems = Problems()
    for what, name in named.items():
        if name is not None and name not in cells:
            problems.add(
                f"{path.name} has no column {name!r} ({what}); {_spelled_otherwise(name, cells)}"
                f"expected one of {name_some(list(cells), repr, shown=20)}"
            )
    if target in chosen:
        problems.add(
            f"column {target!r} is the target and a feature, so the model would only have to copy "
            "it: remove it from features"
        )
    if not chosen:
        problems.add(f"{path.name}: no column is left for the inputs; list some in features")
    if test_share is not None and not 0 < test_share < 1:
        problems.add(f"test_share {test_share}; expected a number between 0 and 1, or None")
    problems.add(*split_by_problems(split_by))
    if target_range is not None:
        problems.add(*range_problems(target_range))
        if classes is not None:
            problems.add("classes and target_range were both given; expected one of them")
    problems.raise_()

    if target_range is None:
        labels, not_private = _labels(cells[target], classes, target)
    else:
        labels, not_private = (numeric_targets(cells[target], target), ()), ()
    kept = {name: as_array(cells[name]) for name in columns}
    if owner is not None:
        read = text_ids if isinstance(cells[owner], tuple) else as_array  # tuples hold text
        ids = as_ids(read(cells[owner]), f"column {owner}", problems)
        problems.raise_()
        assert ids is not None
        kept["owner"] = ids
    test = np.zeros(len(labels[0]), dtype=bool)
    if test_share is not None:
        columns = list(cells.values())
        test = hold_out(columns, kept.get("owner"), test_share, "test", by=split_by)
    array = _array_of(path, cells, chosen)
    if array is not None:
        data = _array_data(path.stem, array, labels, test, kept)
    else:
        data = make_table(
            path.stem, cells, _schema(cells, chosen, missing), labels, test, kept, scale
        )
    return replace(data, not_private=data.not_private + not_private)


@dataclass(frozen=True, eq=False)
class NewRecords:
    """The inputs of records without classes, [records, ...], and other columns, as written."""

    inputs: np.ndarray
    columns: Mapping[str, Sequence[Any]]


def load_inputs(
    path: str | os.PathLike,
    *,
    features: Mapping[str, Declared] | Sequence[str],
    missing: Sequence[Any] = (),
    scale: str = "ranges",
    columns: Sequence[str] = (),
) -> NewRecords:
    """Return the inputs of new records, encoded exactly as `load_table` encodes them.

    Args:
        path, features, missing: as for `load_table`; `features` lists all inputs.
        scale: "ranges", "released" or "none".
        columns: other columns to return; the file may have any others.
    """
    path = Path(path)
    cells = _read(path)
    chosen = declarations(features)
    absent = [name for name in (*chosen, *columns) if name not in cells]
    if absent:
        others = [name for name in cells if name not in (*chosen, *columns)]
        hinted = partial(_hinted, known=others)
        raise OwnerwiseError(
            f"{path.name} has no column {name_some(absent, hinted, shown=20)}; "
            f"expected the columns {name_some([*chosen, *columns], repr, shown=20)} and any "
            "others: rename or add columns"
        )
    array = _array_of(path, cells, chosen)
    if array is not None:
        inputs = _checked_array(path.stem, array)
    else:
        inputs = encode(cells, _schema(cells, chosen, missing), scale).inputs
    return NewRecords(inputs, {name: cells[name] for name in columns})


def _hinted(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f"{name!r} ({hint})" if hint else repr(name)


def _array_of(
    path: Path, cells: Mapping[str, Any], chosen: Mapping[str, Declared]
) -> np.ndarray | None:
    """Return the inputs if they are pictures, texts or a single array; None if not."""
    first, said = next(iter(chosen.items()))
    if len(chosen) > 1:
        return None
    if isinstance(said, Pictures):
        return said.read(cells[first], path)
    if said == TEXT:
        return _texts(cells[first], f"column {first}")
    return cells[first] if np.ndim(cells[first]) > 1 else None


def _read(path: Path) -> Mapping[str, Any]:
    """Return a file's columns, keyed by name, as arrays or tuples of strings."""
    if not path.is_file():
        raise OwnerwiseError(f"no file {path}; expected a table: .csv, .parquet, .npz or .txt")
    kind = path.suffix.lower()
    if kind == ".npz":
        columns = read_arrays(path)
    elif kind in PARQUET:
        with reading(path, "Parquet"):
            columns = dict(parquet_columns(path))
    elif kind == ".csv":
        header, *rows = read_rows(path)
        if len(set(header)) < len(header):
            raise OwnerwiseError(f"{path}: a column name appears twice in the header: rename it")
        if not rows:
            raise OwnerwiseError(HEADER_ALONE.format(path, "record"))
        columns = by_column(path, rows, header)
    elif kind == ".txt":
        columns = _attributes(path)
    else:
        raise unknown_type(path, ".csv, .parquet, .npz or .txt")
    lengths = {name: len(cells) if np.ndim(cells) else 0 for name, cells in columns.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        given = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise OwnerwiseError(
            f"{path}: rows per column (not private): {given or 'no columns'}; expected the same "
            "number in each, and at least one"
        )
    return columns


def _spelled_otherwise(name: str, known: Iterable[str]) -> str:
    """Return a hint if the name exists with different capitalisation, else ""."""
    same = next((other for other in known if other.lower() == name.lower()), None)
    return "" if same is None else f"did you mean {same!r}? "


def _attributes(path: Path) -> dict[str, tuple]:
    """Return the columns of an attribute list (a count, the column names and a row per picture)."""
    with reading(path, "a list of attributes"):
        count, names, *rows = path.read_text(encoding="utf-8").splitlines()
        if int(count) != len(rows):
            raise OwnerwiseError(
                f"{path}: the number of rows differs from the number in the first line; the file "
                "is corrupted, truncated or the wrong one: get a fresh copy"
            )
        return by_column(path, [row.split() for row in rows], ["file", *names.split()])


def _schema(
    cells: Mapping[str, Any], declared: Mapping[str, Declared], missing: Sequence[Any]
) -> Schema:
    """Return the schema of the columns, each of which must have one dimension."""
    problems = Problems()
    for name in declared:
        if np.ndim(cells[name]) > 1:
            shape = list(np.shape(cells[name]))
            problems.add(
                f"column {name} has shape {shape}; a column with more than one dimension must be "
                "the only feature"
            )
    problems.raise_()
    return schema_of(declared, missing)


def _labels(
    cells: Any, classes: Sequence[Any] | None, target: str
) -> tuple[tuple[np.ndarray, tuple[str, ...]], tuple[str, ...]]:
    """Return (targets, class names), and a description of anything in them that is not private."""
    written = list(map(name_of, cells.tolist() if hasattr(cells, "tolist") else cells))
    missing = [at for at, cell in enumerate(written) if cell in (*MISSING, "nan", "None")]
    if missing:
        raise OwnerwiseError(
            f"column {target}: no class in record {name_some(missing)}; fill it in, or remove the "
            "record"
        )
    not_private = ()
    if classes is None:
        distinct = sorted(set(written))
        if all(name.lstrip("-").isdigit() for name in distinct):
            distinct.sort(key=int)
        names = tuple(distinct)
        not_private = ("the list of classes, found in the records",)
        warnings.warn(
            f"the classes of {target} were taken from the records: the list is NOT private; pass "
            "classes=[...] from public knowledge instead",
            PrivacyWarning,
            stacklevel=3,
        )
    else:
        names = tuple(map(name_of, classes))
    return (class_of(written, names, f"column {target}"), names), not_private


def _array_data(
    name: str,
    inputs: np.ndarray,
    labels: tuple[np.ndarray, tuple[str, ...]],
    test: np.ndarray,
    columns: Mapping[str, np.ndarray],
) -> DataSet:
    targets, classes = labels
    records = Records(_checked_array(name, inputs), targets, columns)
    form = f"{records.inputs.dtype} {list(records.inputs.shape[1:])}, unchanged"
    return DataSet(
        name,
        records.take(~test),
        records.take(test) if test.any() else None,
        classes,
        form="texts" if records.are_texts else form,
    )


def _checked_array(name: str, inputs: np.ndarray) -> np.ndarray:
    """Return texts as they are, and numbers as float32 or int64; reject what is not finite."""
    if inputs.dtype == object:
        return inputs
    kinds = {"f": np.float32, "i": np.int64, "u": np.int64}
    if inputs.dtype.kind not in kinds:
        raise OwnerwiseError(f"{name}: inputs of type {inputs.dtype}; expected numbers")
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise OwnerwiseError(f"{name}: some inputs are not finite; fill in the missing values")
    return inputs.astype(kinds[inputs.dtype.kind])


def _texts(cells: Sequence[Any], what: str) -> np.ndarray:
    """Return texts as an array of dtype object; the width of a text array depends on all texts."""
    wrong = [at for at, cell in enumerate(cells) if cell is not None and not isinstance(cell, str)]
    if wrong:
        raise OwnerwiseError(
            f"{what}: no text in {name_some(wrong, record)}; expected text (str) in every record"
        )
    texts = np.empty(len(cells), dtype=object)
    texts[:] = [str(cell or "") for cell in cells]
    return texts
