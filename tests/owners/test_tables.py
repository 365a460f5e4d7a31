"""One reader for tables of budgets and tables of records."""

import io
from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.data import load_table
from ownerwise.owners import csv_rows, text_ids


@pytest.mark.parametrize(
    ("cells", "ids"),
    [
        (["1", "20", "-3"], [1, 20, -3]),
        (["007", "8"], ["007", "8"]),
        (["1", "x"], ["1", "x"]),
        (["1", "+2"], ["1", "+2"]),
        (["1", ""], ["1", ""]),
        (["9" * 30], ["9" * 30]),
    ],
)
def test_ids_become_ints_only_if_all_are_written_as_ints_are(cells, ids):
    assert text_ids(cells).tolist() == ids
    assert text_ids(tuple(cells)).tolist() == ids


@pytest.mark.parametrize("names", [("007", "008"), ("7", "8"), ("a", "b")])
def test_an_id_means_the_same_owner_in_budgets_and_in_records(names, tmp_path):
    first, second = names
    budgets, visits = tmp_path / "budgets.csv", tmp_path / "visits.csv"
    budgets.write_text(f"owner,epsilon\n{first},1\n{second},2\n")
    visits.write_text(f"age,clinic,ill\n30,{first},0\n40,{second},1\n50,{second},0\n")
    data = load_table(visits, target="ill", owner="clinic", classes=["0", "1"], test_share=None)
    owners = ow.Owners(data.train.columns["owner"], budgets)
    assert owners.records.tolist() == [1, 2]
    assert list(map(str, owners.ids)) == list(names)


def test_rows_come_stripped_with_their_line_numbers():
    text = io.StringIO('\n a , "b, c"\n\n1,  2 \n', newline="")
    rows = list(csv_rows(text, Path("t.csv"), "empty"))
    assert rows == [(2, ["a", "b, c"]), (4, ["1", "2"])]
