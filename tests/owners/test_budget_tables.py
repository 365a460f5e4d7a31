"""Budget tables from files and DataFrames: what is read, and what is said about bad ones."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from ownerwise.errors import BudgetError
from ownerwise.owners import (
    Owners,
)

ROWS = {
    "owner": ["clinic b", "clinic c", "clinic a"],
    "epsilon": [2.0, 0.5, 1.0],
    "delta": [1e-6, 1e-5, 1e-6],
    "records": [20, 30, 10],
}


def write(tmp_path, text, name="budgets.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


def problems(table, record_owner=None, **options):
    with pytest.raises(BudgetError) as error:
        Owners(record_owner, table, **options)
    return error.value.problems


def only_problem(table, *words, **options):
    (problem,) = problems(table, **options)
    for word in words:
        assert word in problem
    return problem


def assert_is_rows(owners):
    assert owners.ids.tolist() == ["clinic a", "clinic b", "clinic c"]
    assert owners.epsilon.tolist() == [1.0, 2.0, 0.5]
    assert owners.delta.tolist() == [1e-6, 1e-6, 1e-5]
    assert owners.records.tolist() == [10, 20, 30]
    assert owners.records_basis == "declared"
    assert owners.record_owner_index is None


@pytest.fixture
def frame():
    return pd.DataFrame(ROWS)


class TestSources:
    def test_a_data_frame_is_read(self, frame):
        assert_is_rows(Owners.from_table(frame))

    def test_data_frame_with_any_index_and_column_order(self, frame):
        shuffled = frame[["records", "epsilon", "owner", "delta"]].iloc[[2, 0, 1]]
        assert_is_rows(Owners.from_table(shuffled))

    def test_data_frame_of_nullable_and_categorical_columns(self, frame):
        frame = frame.astype({"owner": "category", "epsilon": "Float64", "records": "Int64"})
        assert_is_rows(Owners.from_table(frame))

    @pytest.mark.parametrize("as_text", [True, False])
    def test_a_csv_file_is_read(self, tmp_path, frame, as_text):
        path = tmp_path / "budgets.csv"
        frame.to_csv(path, index=False)
        assert_is_rows(Owners.from_table(str(path) if as_text else path))

    def test_csv_as_spreadsheets_write_it(self, tmp_path):
        """A byte order mark, CRLF, quotes, spaces, blank lines and empty rows at the end."""
        text = (
            '\ufeffowner, "epsilon",delta , records\r\n"clinic b",2,1e-6,20\r\n\r\n'
            'clinic c , 0.5 ,1E-5, 30\r\n"clinic a","1.0",1e-6,10\r\n,,,\r\n'
        )
        assert_is_rows(Owners.from_table(write(tmp_path, text)))

    def test_csv_quoted_names_keep_commas_and_quotes(self, tmp_path):
        path = write(tmp_path, 'owner,epsilon\n"ives, kerr",1\n"the ""old"" mill",2\nåse,3\n')
        assert Owners.from_table(path).ids.tolist() == ["ives, kerr", 'the "old" mill', "åse"]

    @pytest.mark.parametrize(
        ("cells", "ids"),
        [
            (["10", "9", "-3"], [-3, 9, 10]),
            (["007", "8", "9"], ["007", "8", "9"]),
            (["1", "a", "2"], ["1", "2", "a"]),
            (["1.0", "2", "3"], ["1.0", "2", "3"]),
            (["1_0", "2", "3"], ["1_0", "2", "3"]),
            (["9" * 25, "1", "2"], ["1", "2", "9" * 25]),
        ],
    )
    def test_csv_ids_are_ints_only_if_all_are_written_so(self, tmp_path, cells, ids):
        rows = "".join(f"{cell},1\n" for cell in cells)
        assert Owners.from_table(write(tmp_path, "owner,epsilon\n" + rows)).ids.tolist() == ids

    def test_csv_levels_mixed_with_numerals(self, tmp_path):
        path = write(tmp_path, "owner,epsilon\na,high\nb,1.5\nc,low\n")
        owners = Owners.from_table(path, levels={"high": 0.5, "low": 5})
        assert owners.epsilon.tolist() == [0.5, 1.5, 5.0]

    @pytest.mark.parametrize("name", ["budgets.parquet", "budgets.PQ"])
    def test_a_parquet_file_is_read(self, tmp_path, frame, name):
        frame.to_parquet(tmp_path / name, index=False)
        assert_is_rows(Owners.from_table(tmp_path / name))

    def test_parquet_with_dictionary_and_decimal_columns(self, tmp_path):
        table = pa.table(
            {
                "owner": pa.array(ROWS["owner"]).dictionary_encode(),
                "epsilon": pa.array(["2.0", "0.5", "1.0"]).cast(pa.decimal128(3, 1)),
                "delta": ROWS["delta"],
                "records": pa.array(ROWS["records"], pa.uint8()),
            }
        )
        parquet.write_table(table, tmp_path / "budgets.parquet")
        assert_is_rows(Owners.from_table(tmp_path / "budgets.parquet"))

    def test_declared_records_go_before_the_column(self, frame):
        owners = Owners.from_table(frame, records=dict.fromkeys(ROWS["owner"], 7))
        assert owners.records.tolist() == [7] * 3

    def test_without_a_records_column_one_record_each_is_assumed(self, frame):
        owners = Owners.from_table(frame[["owner", "epsilon"]])
        assert owners.records.tolist() == [1, 1, 1]
        assert owners.delta.tolist() == [1e-5] * 3
        assert "one record each (assumed public)" in repr(owners)

    def test_the_table_in_examples_is_read(self):
        path = Path(__file__).parents[2] / "examples" / "budgets.csv"
        owners = Owners.from_table(path)
        assert len(owners) == 12
        assert (owners.epsilon.min(), owners.epsilon.max()) == (0.5, 8.0)
        assert owners.total_records == 20_000


class TestDeltas:
    """A delta that an owner set always holds; the argument is for owners who set none."""

    BLANK = "owner,epsilon,delta\nb,2,\na,1,1e-7\nc,3, \n"

    @pytest.mark.parametrize(
        "delta", [None, 1e-3, dict.fromkeys(ROWS["owner"], 1e-3), np.full(3, 1e-3)]
    )
    @pytest.mark.parametrize("kind", ["frame", "csv", "parquet"])
    def test_a_column_of_the_table_always_holds(self, tmp_path, frame, kind, delta):
        table = frame
        if kind == "csv":
            table = tmp_path / "budgets.csv"
            frame.to_csv(table, index=False)
        elif kind == "parquet":
            table = tmp_path / "budgets.parquet"
            frame.to_parquet(table)
        assert_is_rows(Owners.from_table(table, delta))
        ids = np.repeat(ROWS["owner"], ROWS["records"])
        assert Owners(ids, table, delta).delta.tolist() == [1e-6, 1e-6, 1e-5]

    @pytest.mark.parametrize("gap", [None, np.nan, pd.NA, ""])
    def test_blank_cells_of_a_frame_are_filled(self, frame, gap):
        blank = frame.assign(delta=[gap, 1e-7, gap])
        assert Owners.from_table(blank).delta.tolist() == [1e-5, 1e-5, 1e-7]
        assert Owners.from_table(blank, 1e-8).delta.tolist() == [1e-8, 1e-8, 1e-7]

    def test_blank_cells_of_a_nullable_column_are_filled(self, frame):
        blank = frame.assign(delta=pd.array([None, 1e-7, None], dtype="Float64"))
        assert Owners.from_table(blank, 1e-8).delta.tolist() == [1e-8, 1e-8, 1e-7]

    def test_blank_cells_of_csv_are_filled(self, tmp_path):
        path = write(tmp_path, self.BLANK)
        assert Owners.from_table(path).delta.tolist() == [1e-7, 1e-5, 1e-5]
        assert Owners.from_table(path, 1e-8).delta.tolist() == [1e-7, 1e-8, 1e-8]

    def test_blank_cells_of_parquet_are_filled(self, tmp_path):
        columns = {"owner": [9, 1], "epsilon": [1.0, 2.0], "delta": [None, 1e-7]}
        parquet.write_table(pa.table(columns), tmp_path / "budgets.parquet")
        owners = Owners.from_table(tmp_path / "budgets.parquet", delta=1e-8)
        assert owners.delta.tolist() == [1e-7, 1e-8]

    def test_a_column_without_any_delta_is_filled(self, tmp_path):
        path = write(tmp_path, "owner,epsilon,delta\na,1,\nb,2,\n")
        assert Owners.from_table(path).delta.tolist() == [1e-5, 1e-5]

    @pytest.mark.parametrize("delta", [{"a": 1e-4, "b": 1e-8, "c": 1e-9}, [1e-4, 1e-8, 1e-9]])
    def test_each_owner_gets_their_own_default_delta(self, tmp_path, delta):
        owners = Owners.from_table(write(tmp_path, self.BLANK), delta)
        assert owners.delta.tolist() == [1e-7, 1e-8, 1e-9]

    def test_a_wrong_delta_is_reported_whether_it_is_needed_or_not(self, tmp_path, frame):
        only_problem(frame, "delta of all owners (2)", delta=2)
        path = write(tmp_path, "owner,epsilon,delta\na,1,\nb,2,0\nc,3,little\n")
        own, number, given = problems(path, delta={"a": None, "b": 1e-5, "c": 1e-5})
        assert "delta of owner c ('little', row 4)" in own
        assert "delta of owner b ('0', row 3)" in number
        assert "delta of owner a (None)" in given


class TestBadFiles:
    def test_a_missing_file_is_refused(self):
        only_problem("nowhere.csv", "no file nowhere.csv", "CSV or Parquet", "levels=")

    def test_a_folder_is_refused(self, tmp_path):
        only_problem(tmp_path, "cannot be read", str(tmp_path), "export")

    def test_a_file_that_is_not_utf8_is_refused(self, tmp_path):
        path = write(tmp_path, "owner,epsilon\nåse,1\n", encoding="latin-1")
        only_problem(path, "cannot be read", "UTF-8")

    def test_an_unclosed_quote_is_refused(self, tmp_path):
        path = write(tmp_path, 'owner,epsilon\n"a,1\nb,2\n')
        only_problem(path, "cannot be read", "unexpected end of data")

    def test_a_file_that_is_not_parquet_is_refused(self, tmp_path):
        path = write(tmp_path, "owner,epsilon\na,1\n", "budgets.parquet")
        only_problem(path, "cannot be read", "Parquet")

    def test_parquet_without_pyarrow(self, tmp_path, frame, monkeypatch):
        frame.to_parquet(tmp_path / "budgets.parquet")
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        only_problem(tmp_path / "budgets.parquet", "needs pyarrow", "ownerwise[table]", "CSV")

    def test_an_unreadable_file_does_not_hide_other_problems(self):
        found = problems("nowhere.csv", [1.5, 2.5], delta=2)
        assert [text.split()[0] for text in found] == [
            "no",
            "record_owner:",
            "delta",
        ]


class TestBadTables:
    @pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
    def test_an_empty_file_is_refused(self, tmp_path, text):
        only_problem(write(tmp_path, text), "budgets.csv is empty; expected", "owner, epsilon")

    def test_a_header_without_rows_is_refused(self, tmp_path):
        path = write(tmp_path, "owner,epsilon\n")
        only_problem(path, "has a header but no rows", "one row per owner")

    @pytest.mark.parametrize(
        "text",
        [
            "owner;epsilon;delta\na;1;1e-6\n",
            '\n"owner";"epsilon"\n"a";"1"\n',
            "owner\tepsilon\na\t1\n",
        ],
    )
    def test_other_separators_are_read(self, tmp_path, text):
        owners = Owners(None, write(tmp_path, text))
        assert (owners.ids.tolist(), owners.epsilon.tolist()) == (["a"], [1.0])

    def test_a_decimal_comma_is_refused(self, tmp_path):
        only_problem(write(tmp_path, "owner;epsilon\na;0,5\nb;1\n"), "epsilon")

    def test_names_that_differ_by_case(self, tmp_path):
        path = write(tmp_path, "Owner,EPSILON,records\n1,1,5\n2,-2,5\n")
        names, value = problems(path)
        assert "column Owner, EPSILON: expected lower-case names; rename to owner, eps" in names
        assert "epsilon of owner 2 (-2.0, row 3)" in value

    def test_a_column_in_two_spellings(self, tmp_path):
        path = write(tmp_path, "owner,epsilon,Epsilon\na,1,2\n")
        assert "more than one column epsilon" in problems(path)[-1]

    def test_an_empty_data_frame_is_refused(self, frame):
        only_problem(frame.iloc[:0], "the table has a header but no rows", "one row per owner")

    def test_unknown_columns_and_a_wrong_value(self, tmp_path):
        path = write(tmp_path, "owner,epsilon,name,town\na,-1,x,y\n")
        columns, value = problems(path)
        assert "unknown column name, town" in columns
        assert "remove" in columns
        assert "epsilon of owner a (-1.0, row 2)" in value

    def test_missing_columns_are_named(self, frame):
        only_problem(frame.rename(columns={"owner": "id"})[["epsilon"]], "no column owner")
        only_problem(frame[["owner", "delta"]], "no column epsilon", "rename")

    def test_a_repeated_column_is_refused(self, tmp_path, frame):
        only_problem(write(tmp_path, "owner,epsilon,epsilon\na,1,2\n"), "more than one column")
        only_problem(pd.concat([frame, frame[["delta"]]], axis=1), "more than one column delta")

    def test_short_and_long_rows_are_named(self, tmp_path):
        path = write(tmp_path, "owner,epsilon,delta\na,1,1e-5\n\nb,1\nc,1,1e-5,7\nd,0,1e-5\n")
        rows, value = problems(path)
        assert "row 4 (2 cells), row 5 (4 cells): expected 3 cells" in rows
        assert "quote names" in rows
        assert "epsilon of owner d (0.0, row 6)" in value

    def test_short_row_does_not_leave_its_owner_without_budget(self, tmp_path):
        path = write(tmp_path, "owner,epsilon,delta\na,1\n")
        row, budget = problems(path, ["a", "b"])
        assert "row 2 (2 cells)" in row
        assert "no budget for owner b;" in budget

    def test_cells_that_are_no_numbers(self, tmp_path):
        path = write(tmp_path, 'owner,epsilon,delta,records\na,"0,5",none,many\nb,1,1e-5,2\n')
        epsilon, delta, records = problems(path)
        assert "epsilon of owner a ('0,5', row 2) in" in epsilon
        assert "pass levels=" in epsilon
        assert "delta of owner a ('none', row 2)" in delta
        assert "records of owner a ('many', row 2)" in records
        assert all(str(path) in text for text in (epsilon, delta, records))

    def test_unknown_levels_are_named(self, tmp_path):
        path = write(tmp_path, "owner,epsilon\na,hgih\nb,low\nc,1\n")
        only_problem(path, "owner a ('hgih', row 2)", "(known levels: low)", levels={"low": 5})

    def test_repeated_owners_are_named(self, tmp_path):
        rows = "".join(f"{name},1\n" for name in "abcdeabcdef")
        path = write(tmp_path, "owner,epsilon\n" + rows)
        only_problem(path, "owner a, b, c and 2 more", "more than once", "remove the duplicates")

    def test_duplicates_do_not_hide_records_without_budget(self, frame):
        twice, budget = problems(pd.concat([frame, frame]), ["clinic a", "clinic x"])
        assert "more than once" in twice
        assert "no budget for owner clinic x;" in budget

    def test_rows_without_an_id_are_named(self, tmp_path, frame):
        path = write(tmp_path, "owner,epsilon\na,1\n,2\nb,-3\n")
        ids, value = problems(path)
        assert "no owner id in row 3" in ids
        assert "add the id" in ids
        assert "epsilon of owner b" in value
        for gap in (None, np.nan, pd.NA):
            only_problem(frame.assign(owner=["a", gap, "b"]), "no owner id in row 1")

    def test_missing_int_ids_of_parquet_stay_ints(self, tmp_path):
        table = pa.table({"owner": [1, None, 3], "epsilon": [1.0, 2.0, None]})
        parquet.write_table(table, tmp_path / "budgets.parquet")
        ids, value = problems(tmp_path / "budgets.parquet")
        assert "no owner id in row 1" in ids
        assert "epsilon of owner 3 (None, row 2)" in value

    def test_float_and_mixed_ids_are_refused(self, frame):
        only_problem(frame.assign(owner=[1.0, 2.0, 3.0]), "type float", "all int or all str")
        only_problem(frame.assign(owner=[1, "a", 3]), "type int and str", "convert")

    def test_values_of_a_frame_name_owner_and_row(self, frame):
        wrong = frame.assign(epsilon=[np.nan, 0.5, np.inf], records=[1, 2.5, -1])
        epsilon, records = problems(wrong)
        assert "clinic a (inf, row 2), clinic b (nan, row 0) in the table" in epsilon
        assert "clinic a (-1.0, row 2), clinic c (2.5, row 1) in the table" in records


class TestIds:
    @pytest.mark.parametrize(
        "record_owner",
        [
            [7, -2, 7],
            (7, -2, 7),
            [np.int32(7), -2, np.int64(7)],
            np.array([7, -2, 7], dtype=np.int8),
            np.array([7, -2, 7], dtype=">i4"),
            torch.tensor([7, -2, 7]),
            pd.Series([7, -2, 7], index=[5, 1, 3]),
            pd.Series([7, -2, 7], dtype="Int64"),
            iter([7, -2, 7]),
        ],
    )
    def test_every_way_to_give_int_ids(self, record_owner):
        owners = Owners(record_owner, {-2: 1.0, 7: 2.0})
        assert owners.ids.dtype == np.int64
        assert owners.ids.tolist() == [-2, 7]
        assert owners.record_owner_index.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        "record_owner",
        [
            np.array(["b", "a"]),
            np.array(["b", "a"], dtype=object),
            pd.Series(["b", "a"]),
            pd.Series(["b", "a"], dtype="category"),
            pd.Series(["b", "a"], dtype="string"),
        ],
    )
    def test_every_way_to_give_str_ids(self, record_owner):
        assert Owners(record_owner, 1.0).ids.tolist() == ["a", "b"]

    @pytest.mark.parametrize(
        ("ids", "kind"),
        [
            ([1.0, 2.0], "float"),
            (np.array([1.0, 2.0]), "float"),
            ([True, False], "bool"),
            (torch.tensor([True, False]), "bool"),
            ([1, "a"], "int and str"),
            ([1, True], "bool and int"),
            ([1, np.float32(2)], "float and int"),
            ([b"a", b"b"], "bytes"),
            (np.array(["2020-01-01"], dtype="datetime64[ns]"), "datetime64"),
        ],
    )
    def test_ids_of_other_types(self, ids, kind):
        only_problem(1.0, f"of type {kind},", "all int or all str", "convert", record_owner=ids)

    def test_ids_beyond_64_bits(self):
        only_problem(1.0, "64 bits", "use str", record_owner=[2**63])
        only_problem(1.0, "64 bits", "use str", record_owner=[1, -(2**70)])

    @pytest.mark.parametrize("ids", ["abc", {"a": 1}, 5, np.zeros((2, 2), int)])
    def test_no_list_of_ids(self, ids):
        only_problem(1.0, "record_owner has shape", "a list of owner ids", record_owner=ids)


@pytest.mark.parametrize("text", ["0_5", "1_0.5", "٣", "1٠", "１", "0x1p1", "1,5", "1 000", "1e"])
def test_a_number_in_another_notation_is_refused_not_guessed(tmp_path, text):
    """Python reads "0_5" as 5, an epsilon ten times too large, and digits of other scripts."""
    with pytest.raises(BudgetError, match="neither a number nor a known level"):
        Owners(["a"], {"a": text})
    path = tmp_path / "budgets.csv"
    path.write_text(f'owner,epsilon\na,"{text}"\nb,0.5\n', encoding="utf-8")
    with pytest.raises(BudgetError, match="neither a number nor a known level"):
        Owners(["a", "b"], path)


@pytest.mark.parametrize("text", ["0.5", "5e-1", "+.5", " 0.5 ", "0.50", "5E-1"])
def test_usual_notations_of_a_number_are_read(tmp_path, text):
    assert Owners(["a"], {"a": text}).epsilon[0] == 0.5
    path = tmp_path / "budgets.csv"
    path.write_text(f"owner,epsilon\na,{text}\nb,low\n")
    assert Owners(["a", "b"], path, levels={"low": 1.0}).epsilon.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    "given", [[b"0_5"], np.array([b"5"]), b"5", {"a": b"5"}, {"a": bytearray(b"5")}]
)
def test_text_as_bytes_is_refused(given):
    """Python reads b"0_5" as 5, and bytes as a list of character codes."""
    with pytest.raises(BudgetError):
        Owners(["a"], given)
