"""Tables of financial data about people: Adult (census income) and credit card defaults.

The ranges are fixed round numbers, and the lists of categories come from the data sets' own
descriptions. Neither the ranges nor the lists are computed from the loaded records.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ownerwise.data.features import Category, Number, class_of, make_table
from ownerwise.data.reading import by_column, read_rows
from ownerwise.data.records import DataSet
from ownerwise.data.splits import positional_split
from ownerwise_reproduction.data.sources import Download, Part, Source, locate
from ownerwise_reproduction.data.tables import expect_header, read_sheet, whole_numbers

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"

ADULT = Source(
    "adult",
    "https://archive.ics.uci.edu/dataset/2/adult",
    tuple(
        Part((name,), (Download(name, (f"{_UCI}/adult/{name}",), sha256),))
        for name, sha256 in (
            ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
            ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
        )
    ),
)
ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
_COUNTRIES = """
    United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India
    Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico
    Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala
    Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong
    Holand-Netherlands"""
ADULT_SCHEMA = (
    Number("age", 0, 100),
    Number("education-num", 1, 16),
    Number("capital-gain", 0, 100_000, logarithmic=True),
    Number("capital-loss", 0, 10_000, logarithmic=True),
    Number("hours-per-week", 0, 100),
    Category(
        "workclass",
        (
            *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov"),
            *("State-gov", "Without-pay", "Never-worked"),
        ),
    ),
    Category(
        "marital-status",
        (
            *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed"),
            *("Married-spouse-absent", "Married-AF-spouse"),
        ),
    ),
    Category(
        "occupation",
        (
            *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial"),
            *("Prof-specialty", "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical"),
            *("Farming-fishing", "Transport-moving", "Priv-house-serv", "Protective-serv"),
            "Armed-Forces",
        ),
    ),
    Category(
        "relationship",
        ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    ),
    Category("race", ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
    Category("sex", ("Female", "Male")),
    Category("native-country", tuple(_COUNTRIES.split())),
)
"""`education` duplicates `education-num`, and `fnlwgt` is a survey weight, not a property of the
person: both are left out.
"""

CREDIT = Source(
    "credit_default",
    "https://archive.ics.uci.edu/dataset/350/default+of+credit+card+clients",
    (
        Part(
            ("UCI_Credit_Card.csv", "default of credit card clients.xls"),
            (
                Download(
                    "default of credit card clients.xls",
                    (f"{_UCI}/00350/default%20of%20credit%20card%20clients.xls",),
                    "30c6be3abd8dcfd3e6096c828bad8c2f011238620f5369220bd60cfc82700933",
                ),
            ),
        ),
    ),
)
_MONTHS = ("1", "2", "3", "4", "5", "6")
CREDIT_COLUMNS = (
    *("ID", "LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"),
    *(f"PAY_{month}" for month in ("0", *_MONTHS[1:])),
    *(f"BILL_AMT{month}" for month in _MONTHS),
    *(f"PAY_AMT{month}" for month in _MONTHS),
    "default payment next month",
)
CREDIT_SCHEMA = (
    Number("LIMIT_BAL", 1_000, 1_000_000, logarithmic=True),
    Category("SEX", ("1", "2")),
    Category("EDUCATION", tuple("0123456")),
    Category("MARRIAGE", tuple("0123")),
    Number("AGE", 18, 100),
    *(Number(name, -2, 9) for name in CREDIT_COLUMNS[6:12]),
    *(Number(name, -2e6, 2e6, logarithmic=True) for name in CREDIT_COLUMNS[12:18]),
    *(Number(name, 0, 2e6, logarithmic=True) for name in CREDIT_COLUMNS[18:24]),
)


def load_adult(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "ranges"
) -> DataSet:
    """Return Adult (official split): 32561 + 16281 people, labelled by whether they earn over 50K.

    The records are from the 1994 census. Columns: `sex`, `race`, `age`. A missing value ("?") is
    not assigned to any category. `scale` is "ranges" (declared and public), "statistics" (computed
    from the training records, so NOT private) or "none".
    """
    paths = locate(ADULT, data_dir, download)
    parts = [read_rows(path, len(ADULT_COLUMNS)) for path in paths]
    rows = [row for part in parts for row in part]
    cells = by_column(paths[0], rows, ADULT_COLUMNS)
    income = [label.rstrip(".") for label in cells["income"]]  # the test file has dots
    classes = ("<=50K", ">50K")
    columns = {name: np.array(cells[name]) for name in ("sex", "race")}
    columns["age"] = whole_numbers(paths[0], cells["age"])
    labels = (class_of(income, classes, "income of adult"), classes)
    test = np.arange(len(rows)) >= len(parts[0])
    return make_table("adult", cells, ADULT_SCHEMA, labels, test, columns, scale)


def load_credit_default(
    data_dir: str | os.PathLike | None = None, download: bool = True, *, scale: str = "ranges"
) -> DataSet:
    """Return 30000 clients of a Taiwanese bank, labelled by whether they defaulted the next month.

    There is no official split: every fifth record of each class is a test record. Columns: `sex`,
    `education` and `marriage` (coded as in the source), and `age`. `scale` works in the same way
    as for Adult.
    """
    (path,) = locate(CREDIT, data_dir, download)
    rows = _credit_rows(path)
    cells = by_column(path, rows, CREDIT_COLUMNS)
    targets = class_of(cells[CREDIT_COLUMNS[-1]], ("0", "1"), "default of credit_default")
    sexes = np.array(("male", "female"))
    columns = {
        "sex": sexes[class_of(cells["SEX"], ("1", "2"), "SEX of credit_default")],
        "education": whole_numbers(path, cells["EDUCATION"]),
        "marriage": whole_numbers(path, cells["MARRIAGE"]),
        "age": whole_numbers(path, cells["AGE"]),
    }
    labels = (targets, ("paid", "default"))
    return make_table(
        "credit_default", cells, CREDIT_SCHEMA, labels, positional_split(targets), columns, scale
    )


def _credit_rows(path: Path) -> list[list[str]]:
    """Return the rows below the header, with whole numbers written without a decimal point."""
    if path.suffix == ".xls":
        sheet = read_sheet(path, "Data")
        header, rows = list(map(str, sheet[1] if len(sheet) > 1 else [])), sheet[2:]
    else:
        header, *rows = read_rows(path, len(CREDIT_COLUMNS))
    numbered = ["ID", *(f"X{number}" for number in range(1, 24)), "Y"]
    if header != numbered:
        expect_header(path, [name.replace(".", " ") for name in header], CREDIT_COLUMNS)
    return [[_whole(cell) for cell in row] for row in rows]


def _whole(cell: object) -> str:
    return str(cell).removesuffix(".0")
