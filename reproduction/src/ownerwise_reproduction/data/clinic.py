"""Tables of patient data: cardiotocograms, heart disease, and voice recordings (Parkinson's).

The ranges are fixed round numbers, not computed from the loaded records; values outside them are
clipped.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from ownerwise.data.features import Category, Number, class_of, make_table
from ownerwise.data.reading import (
    by_column,
    read_rows,
    reading,
)
from ownerwise.data.records import DataSet
from ownerwise.data.splits import positional_split
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction.data.sources import Download, Part, Source, locate
from ownerwise_reproduction.data.tables import expect_header, read_sheet, whole_numbers

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"


def _source(name: str, page: str, path: str, sha256: str, *other_names: str) -> Source:
    file = Path(path).name
    part = Part((*other_names, file), (Download(file, (f"{_UCI}/{path}",), sha256),))
    folders = ("parkinsons",) if name == "parkinsons_telemonitoring" else ()
    return Source(name, f"https://archive.ics.uci.edu/dataset/{page}", (part,), folders)


CTG = _source(
    "ctg",
    "193/cardiotocography",
    "00193/CTG.xls",
    "d6aa62e82625e59f9d5b05bc8fc52af9ea67bdf2a23f1faca8511d5618fcb421",
    "CTG.csv",
)
_CTG_NAMES = """
    FileName Date SegFile b e LBE LB AC FM UC ASTV MSTV ALTV MLTV DL DS DP DR Width Min Max Nmax
    Nzeros Mode Mean Median Variance Tendency A B C D E AD DE LD FS SUSP CLASS NSP"""
CTG_COLUMNS = tuple(_CTG_NAMES.split())
CTG_COUNTS = ("AC", "FM", "UC", "DL", "DS", "DP")
"""Counts per recording, which are divided by its length in seconds before they become inputs."""
CTG_SCHEMA = (
    Number("LB", 50, 200),  # beats per minute
    Number("AC", 0, 0.02),
    Number("FM", 0, 0.05),
    Number("UC", 0, 0.02),
    Number("ASTV", 0, 100),  # per cent of the time
    Number("MSTV", 0, 5),
    Number("ALTV", 0, 100),
    Number("MLTV", 0, 50),
    Number("DL", 0, 0.02),
    Number("DS", 0, 0.002),
    Number("DP", 0, 0.005),
    Number("Width", 0, 200),
    Number("Min", 50, 200),
    Number("Max", 50, 250),
    Number("Nmax", 0, 20),
    Number("Nzeros", 0, 10),
    Number("Mode", 50, 200),
    Number("Mean", 50, 200),
    Number("Median", 50, 200),
    Number("Variance", 0, 200),
    Number("Tendency", -1, 1),
)

HEART = _source(
    "heart",
    "45/heart+disease",
    "heart-disease/processed.cleveland.data",
    "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
)
_HEART_NAMES = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num"
HEART_COLUMNS = tuple(_HEART_NAMES.split())
HEART_SCHEMA = (
    Number("age", 0, 100),
    Category("sex", ("0", "1")),
    Category("cp", tuple("1234")),
    Number("trestbps", 80, 220),
    Number("chol", 100, 500),
    Category("fbs", ("0", "1")),
    Category("restecg", tuple("012")),
    Number("thalach", 60, 220),
    Category("exang", ("0", "1")),
    Number("oldpeak", 0, 6),
    Category("slope", tuple("123")),
    Number("ca", 0, 3),
    Category("thal", ("3", "6", "7")),
)

PARKINSONS = _source(
    "parkinsons",
    "174/parkinsons",
    "parkinsons/parkinsons.data",
    "a36116c2deac07895b79ce97a2f99a1b3720ac4892995ff5c3b9ccb397ed2bc5",
)
PARKINSONS_SCHEMA = (
    Number("MDVP:Fo(Hz)", 50, 300),
    Number("MDVP:Fhi(Hz)", 50, 600),
    Number("MDVP:Flo(Hz)", 50, 300),
    Number("MDVP:Jitter(%)", 0, 0.02),
    Number("MDVP:Jitter(Abs)", 0, 0.0002),
    Number("MDVP:RAP", 0, 0.01),
    Number("MDVP:PPQ", 0, 0.01),
    Number("Jitter:DDP", 0, 0.03),
    Number("MDVP:Shimmer", 0, 0.1),
    Number("MDVP:Shimmer(dB)", 0, 1),
    Number("Shimmer:APQ3", 0, 0.05),
    Number("Shimmer:APQ5", 0, 0.05),
    Number("MDVP:APQ", 0, 0.1),
    Number("Shimmer:DDA", 0, 0.15),
    Number("NHR", 0, 0.2),
    Number("HNR", 0, 40),
    Number("RPDE", 0, 1),
    Number("DFA", 0.5, 1),
    Number("spread1", -8, -2),
    Number("spread2", 0, 0.5),
    Number("D2", 1, 4),
    Number("PPE", 0, 0.5),
)
PARKINSONS_COLUMNS = (
    "name",
    *(feature.name for feature in PARKINSONS_SCHEMA[:16]),
    "status",
    *(feature.name for feature in PARKINSONS_SCHEMA[16:]),
)

TELEMONITORING = _source(
    "parkinsons_telemonitoring",
    "189/parkinsons+telemonitoring",
    "parkinsons/telemonitoring/parkinsons_updrs.data",
    "f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39",
)
TELEMONITORING_SCHEMA = (
    Number("age", 0, 100),
    Category("sex", ("0", "1")),
    Number("test_time", 0, 200),  # days
    Number("Jitter(%)", 0, 0.02),
    Number("Jitter(Abs)", 0, 0.0002),
    Number("Jitter:RAP", 0, 0.01),
    Number("Jitter:PPQ5", 0, 0.01),
    Number("Jitter:DDP", 0, 0.03),
    Number("Shimmer", 0, 0.1),
    Number("Shimmer(dB)", 0, 1),
    Number("Shimmer:APQ3", 0, 0.05),
    Number("Shimmer:APQ5", 0, 0.05),
    Number("Shimmer:APQ11", 0, 0.1),
    Number("Shimmer:DDA", 0, 0.15),
    Number("NHR", 0, 0.2),
    Number("HNR", 0, 40),
    Number("RPDE", 0, 1),
    Number("DFA", 0.5, 1),
    Number("PPE", 0, 0.5),
)
MEDIAN_SCORE = 27.576
"""The median of total_UPDRS in the file: a statistic of its records, and thus not private."""
MOTOR_SCORE = Number("motor_UPDRS", 0, 50)
TELEMONITORING_COLUMNS = (
    *("subject#", "age", "sex", "test_time", "motor_UPDRS", "total_UPDRS"),
    *(feature.name for feature in TELEMONITORING_SCHEMA[3:]),
)


def load_ctg(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "ranges"
) -> DataSet:
    """Return Cardiotocography: 2126 fetal heart recordings that are normal, suspect or pathologic.

    There are 21 features; counts, such as accelerations, are given per second. There is no official
    split: every fifth record of each class is a test record. Columns: `file` (which several records
    may share) and `pattern` (1 to 10). `scale` is "ranges" (declared and public), "statistics"
    (computed from the training records, so NOT private) or "none".
    """
    (path,) = locate(CTG, data_dir, download)
    if path.suffix == ".xls":
        header, *rows = read_sheet(path, "Raw Data")
        rows = [row for row in rows if row[-1] != ""]  # sums and blanks at the end
    else:
        header, *rows = read_rows(path, len(CTG_COLUMNS))
    expect_header(path, header, CTG_COLUMNS)
    cells = by_column(path, rows, CTG_COLUMNS)
    with reading(path, "Cardiotocography"):
        numbers = {
            name: np.array(cells[name], dtype=np.float64)
            for name in ("b", "e", "CLASS", "NSP", *(feature.name for feature in CTG_SCHEMA))
        }
    seconds = numbers["e"] - numbers["b"]
    numbers |= {name: numbers[name] / seconds for name in CTG_COUNTS}
    targets = class_of(numbers["NSP"].tolist(), (1, 2, 3), "NSP of ctg")
    columns = {"file": np.array(cells["FileName"]), "pattern": numbers["CLASS"].astype(np.int64)}
    labels = (targets, ("normal", "suspect", "pathologic"))
    return make_table("ctg", numbers, CTG_SCHEMA, labels, positional_split(targets), columns, scale)


def load_heart(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "ranges"
) -> DataSet:
    """Return Heart Disease (Cleveland): 303 patients with or without a narrowed blood vessel.

    There is no official split: every fifth record of each class is a test record. Columns: `sex`,
    `age` and `severity` (0 to 4; 1 or more means disease). Six values are missing: a missing number
    is replaced by the middle of its range, and a missing category is encoded as zeros. `scale`
    works as for Cardiotocography.
    """
    (path,) = locate(HEART, data_dir, download)
    rows = read_rows(path, len(HEART_COLUMNS))
    rows = [[cell.removesuffix(".0") for cell in row] for row in rows]
    cells = by_column(path, rows, HEART_COLUMNS)
    severity = class_of(cells["num"], tuple("01234"), "num of heart")
    columns = {
        "sex": np.array(("female", "male"))[class_of(cells["sex"], ("0", "1"), "sex of heart")],
        "age": whole_numbers(path, cells["age"]),
        "severity": severity,
    }
    targets = (severity > 0).astype(np.int64)
    labels = (targets, ("no disease", "disease"))
    return make_table(
        "heart", cells, HEART_SCHEMA, labels, positional_split(targets), columns, scale
    )


def load_parkinsons(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    scale: str = "ranges",
    split: str = "subjects",
) -> DataSet:
    """Return Parkinsons: 195 voice recordings of 32 people, healthy or with Parkinson's disease.

    There is no official split. With `split="subjects"`, every fifth subject of each class is a test
    subject. With "records", every fifth record of each class is a test record; recordings of the
    same people are then in both sets, so test results are too optimistic. Column: `subject`.
    `scale` works in the same way as for Cardiotocography.
    """
    (path,) = locate(PARKINSONS, data_dir, download)
    header, *rows = read_rows(path, len(PARKINSONS_COLUMNS))
    expect_header(path, header, PARKINSONS_COLUMNS)
    cells = by_column(path, rows, PARKINSONS_COLUMNS)
    targets = class_of(cells["status"], ("0", "1"), "status of parkinsons")
    subjects = np.array([name.rpartition("_")[0] for name in cells["name"]])
    labels = (targets, ("healthy", "parkinsons"))
    test = _split(targets, subjects, split)
    columns = {"subject": subjects}
    return make_table("parkinsons", cells, PARKINSONS_SCHEMA, labels, test, columns, scale)


def load_parkinsons_telemonitoring(
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    *,
    scale: str = "ranges",
    split: str = "subjects",
    threshold: float = MEDIAN_SCORE,
    motor_score: bool = False,
) -> DataSet:
    """Return Parkinsons Telemonitoring: 5875 voice recordings of 42 people with Parkinson's.

    The class indicates whether the score total_UPDRS is above `threshold`. The default threshold is
    the median score in this file, so it is not private and is listed in `not_private`.
    `motor_score` adds motor_UPDRS, which is part of total_UPDRS, to the features. Columns:
    `subject`, `sex`, `score`. `split` works in the same way as for Parkinsons, and `scale` as for
    Cardiotocography.
    """
    (path,) = locate(TELEMONITORING, data_dir, download)
    header, *rows = read_rows(path, len(TELEMONITORING_COLUMNS))
    expect_header(path, header, TELEMONITORING_COLUMNS)
    cells = by_column(path, rows, TELEMONITORING_COLUMNS)
    with reading(path, "Parkinsons Telemonitoring"):
        score = np.array(cells["total_UPDRS"], dtype=np.float64)
    subjects = whole_numbers(path, cells["subject#"])
    sexes = class_of(cells["sex"], ("0", "1"), "sex of parkinsons_telemonitoring")
    columns = {"subject": subjects, "sex": np.array(("male", "female"))[sexes], "score": score}
    targets = (score > threshold).astype(np.int64)
    labels = (targets, (f"at most {threshold:g}", f"above {threshold:g}"))
    schema = (*TELEMONITORING_SCHEMA, *([MOTOR_SCORE] if motor_score else []))
    test = _split(targets, subjects, split)
    data = make_table("parkinsons_telemonitoring", cells, schema, labels, test, columns, scale)
    if threshold != MEDIAN_SCORE:
        return data
    median = "the threshold between the classes: the median score of the records"
    return replace(data, not_private=(*data.not_private, median))


def _split(targets: np.ndarray, subjects: np.ndarray, split: str) -> np.ndarray:
    if split not in ("subjects", "records"):
        raise OwnerwiseError(f"split {split!r}; expected 'subjects' or 'records'")
    return positional_split(targets, subjects if split == "subjects" else None)
