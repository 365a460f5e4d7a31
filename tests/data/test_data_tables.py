"""Tables of one's own."""

import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import ownerwise as ow
from ownerwise.data import (
    Number,
    assign,
    load_table,
)
from ownerwise.errors import PrivacyWarning
from tools.data_tools import problems, write

CSV = "clinic,age,ward,outcome\n" + "".join(
    f"{clinic},{20 + k},{'ab'[k % 2]},{('well', 'ill')[k // 10]}\n"
    for k, clinic in enumerate(["north", "south"] * 10)
)
DECLARED = {"age": (0, 100), "ward": ["a", "b"]}
OPTIONS = {"target": "outcome", "owner": "clinic", "classes": ["well", "ill"]}


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "visits.csv", CSV)


def as_parquet(path):
    names, *rows = (line.split(",") for line in CSV.splitlines())
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    columns["age"] = list(map(int, columns["age"]))
    parquet.write_table(pa.table({name: list(cells) for name, cells in columns.items()}), path)
    return path


class TestForms:
    def test_csv(self, table):
        split = load_table(table, features=DECLARED, **OPTIONS)
        assert len(split.train) + len(split.test) == 20
        loaded = load_table(table, features=DECLARED, test_share=None, **OPTIONS)
        assert loaded.name == "visits"
        assert loaded.test is None
        assert loaded.classes == ("well", "ill")
        assert loaded.features == ("age", "ward=a", "ward=b")
        assert loaded.train.inputs[1].tolist() == pytest.approx([2 * 0.21 - 1, 0, 1])
        assert loaded.train.targets.tolist() == [0] * 10 + [1] * 10
        assert loaded.train.columns["owner"].tolist()[:2] == ["north", "south"]
        assert loaded.not_private == ()

    @pytest.mark.parametrize("mark", [";", "\t"])
    def test_other_separators(self, table, mark):
        found = load_table(table, features=DECLARED, **OPTIONS)
        table.write_text(CSV.replace(",", mark))
        again = load_table(table, features=DECLARED, **OPTIONS)
        assert np.array_equal(again.train.inputs, found.train.inputs)

    def test_semicolons_and_decimal_commas(self, tmp_path):
        table = write(tmp_path / "t.csv", "a;y\n1,5;no\n0,5;yes\n")
        said = {"a": {"range": [0, 2], "decimal": ","}}
        data = load_table(table, target="y", features=said, classes=["no", "yes"], test_share=None)
        assert data.train.inputs.tolist() == [[0.5], [-0.5]]

    def test_parquet_says_the_same(self, table, tmp_path):
        first = load_table(table, features=DECLARED, **OPTIONS)
        second = load_table(as_parquet(tmp_path / "t.parquet"), features=DECLARED, **OPTIONS)
        assert (first.train.inputs == second.train.inputs).all()
        assert (first.train.targets == second.train.targets).all()
        assert (first.test.columns["owner"] == second.test.columns["owner"]).all()

    def test_arrays(self, tmp_path):
        path = tmp_path / "images.npz"
        images = np.random.default_rng(0).normal(size=(20, 1, 4, 4))
        np.savez(path, x=images, y=np.arange(20) % 2, who=np.arange(20) // 5)
        loaded = load_table(path, target="y", owner="who", classes=[0, 1], test_share=None)
        assert loaded.train.inputs.shape == (20, 1, 4, 4)
        assert loaded.train.inputs.dtype == np.float32
        assert loaded.train.columns["owner"].dtype == np.int64
        assert loaded.classes == ("0", "1")

    def test_texts(self, tmp_path):
        notes = ["mild", "Sévère, très", "", "wörd" + " wörd" * 1000]
        rows = "".join(f'{k % 2},"{note}"\n' for k, note in enumerate(notes))
        options = {"target": "y", "classes": [0, 1], "test_share": None}
        options |= {"features": {"note": "text"}}
        loaded = load_table(write(tmp_path / "notes.csv", "y,note\n" + rows), **options)
        assert loaded.train.inputs.tolist() == notes
        assert loaded.train.are_texts
        assert loaded.form == "texts"
        assert repr(loaded.train) == "Records(texts)"
        cells = {"y": [0, 1, 0, 1], "note": [None if note == "" else note for note in notes]}
        parquet.write_table(pa.table(cells), tmp_path / "notes.parquet")
        again = load_table(tmp_path / "notes.parquet", **options)
        assert again.train.inputs.tolist() == notes  # a missing text is empty

    def test_columns_of_an_archive(self, tmp_path):
        path = tmp_path / "t.npz"
        np.savez(path, a=np.arange(4.0), b=np.ones(4), y=np.array([0.0, 1.0, 0.0, 1.0]))
        loaded = load_table(path, target="y", classes=[0, 1], test_share=None)
        assert loaded.train.inputs.tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
        assert loaded.test is None

    def test_tokens_stay_whole_numbers(self, tmp_path):
        np.savez(tmp_path / "t.npz", x=np.ones((2, 3), np.int32), y=np.array(["a", "b"]))
        loaded = load_table(tmp_path / "t.npz", target="y", classes=["a", "b"], test_share=None)
        assert loaded.train.inputs.dtype == np.int64

    @pytest.mark.parametrize(
        ("ids", "kind"), [(["7", "12"], "i"), (["007", "012"], "U"), (["7", "b"], "U")]
    )
    def test_kinds_of_owner_ids(self, tmp_path, ids, kind):
        text = "who,x,y\n" + "".join(f"{owner},1,0\n" for owner in ids)
        path = write(tmp_path / "t.csv", text)
        loaded = load_table(path, target="y", owner="who", classes=["0"], test_share=None)
        assert loaded.train.columns["owner"].dtype.kind == kind

    def test_owners_can_be_made(self, table):
        loaded = load_table(table, features=DECLARED, **OPTIONS)
        given = assign.by_column(loaded, "owner", {"north": 0.5, "south": 2.0})
        owners = ow.Owners(given.record_owner, given.epsilon, 1e-5)
        assert owners.ids.tolist() == ["north", "south"]
        assert owners.records.sum() == len(loaded.train)
        assert set(given.groups(loaded.test)) <= set(given.group_budgets)


class TestChoices:
    def test_found_classes_are_marked(self, table):
        with pytest.warns(PrivacyWarning, match="NOT private"):
            loaded = load_table(table, target="outcome", features={"age": (0, 100)})
        assert loaded.classes == ("ill", "well")
        assert "list of classes" in loaded.not_private[0]

    def test_found_numbers_are_in_their_order(self, tmp_path):
        path = write(tmp_path / "t.csv", "x,y\n1,10\n2,9\n3,-1\n")
        with pytest.warns(PrivacyWarning):
            assert load_table(path, target="y").classes == ("-1", "9", "10")

    def test_statistics_are_marked(self, table):
        with pytest.warns(PrivacyWarning):
            loaded = load_table(table, features=["age"], scale="statistics", **OPTIONS)
        assert "means and standard deviations" in loaded.not_private[0]
        assert loaded.train.inputs.mean() == pytest.approx(0, abs=1e-6)

    def test_kept_columns(self, table):
        loaded = load_table(table, features=["age"], columns=["ward"], **OPTIONS)
        assert loaded.train.columns["ward"][:2].tolist() == ["a", "b"]

    def test_declared_as_a_number(self, table):
        features = {"age": Number("age", 0, 1000, logarithmic=True)}
        loaded = load_table(table, features=features, **OPTIONS)
        expected = 2 * np.log1p(20) / np.log1p(1000) - 1
        assert loaded.train.inputs[0, 0] == pytest.approx(expected)


class TestRefusals:
    def test_columns_that_are_not_there(self, table):
        found = problems(
            lambda: load_table(table, target="y", owner="who", features=["x"], columns=["z"])
        )
        assert len(found) == 4
        assert "'y' (target)" in found[0]

    def test_a_name_that_differs_by_case(self, table):
        options = OPTIONS | {"target": "Outcome"}
        call = lambda: load_table(table, features=DECLARED, **options)  # noqa: E731
        assert len(problems(call, "no column 'Outcome' (target); did you mean 'outcome'?")) == 1

    def test_text_without_categories(self, table):
        (problem,) = problems(lambda: load_table(table, features=["age", "ward"], **OPTIONS))
        assert "column ward: no finite number in record 0" in problem
        assert "declare its categories from public knowledge" in problem

    def test_missing_numbers_without_a_range(self, tmp_path):
        path = write(tmp_path / "t.csv", "x,y\n1,0\n,0\n")
        call = lambda: load_table(path, target="y", classes=[0], test_share=None)  # noqa: E731
        (problem,) = problems(call)
        assert "column x: a value is missing in record 1," in problem

    @pytest.mark.parametrize("said", [(1, 2, 3), [], ("a", 1), (5, 5)])
    def test_declarations(self, table, said):
        problems(lambda: load_table(table, features={"age": said}, **OPTIONS), "feature age")

    def test_class_outside_the_list(self, table):
        options = OPTIONS | {"classes": ["well", "sick"]}
        problems(
            lambda: load_table(table, features=DECLARED, **options), "unknown value in record 10,"
        )

    @pytest.mark.parametrize(("column", "word"), [(0, "no owner id"), (3, "no class")])
    def test_missing_owner_or_class(self, tmp_path, column, word):
        lines = CSV.splitlines()
        cells = lines[4].split(",")
        cells[column] = ""
        lines[4] = ",".join(cells)
        path = write(tmp_path / "t.csv", "\n".join(lines))
        problems(lambda: load_table(path, features=DECLARED, **OPTIONS), word, "record 3")

    @pytest.mark.parametrize(
        ("name", "content", "word"),
        [
            ("t.csv", "", "is empty"),
            ("t.csv", "\n\n", "is empty"),
            ("t.csv", "a,b\n", "has a header but no rows"),
            ("t.csv", "a,b\n1\n", "2 cells"),
            ("t.csv", "a,a\n1,2\n", "twice"),
            ("t.csv", b"\xff\xfe\x00", "UTF-8"),
            ("t.parquet", "no parquet", "Parquet"),
            ("t.npz", "no archive", "NumPy"),
            ("t.xlsx", "x", "expected .csv"),
        ],
    )
    def test_damaged_files(self, tmp_path, name, content, word):
        path = write(tmp_path / name, content)
        problems(lambda: load_table(path, target="a"), name, word)

    def test_no_file(self, tmp_path):
        problems(lambda: load_table(tmp_path / "t.csv", target="a"), "no file")

    def test_pickled_arrays_are_not_loaded(self, tmp_path):
        np.savez(tmp_path / "t.npz", x=np.array([{}], dtype=object))
        problems(lambda: load_table(tmp_path / "t.npz", target="x"), "t.npz", "pickle")

    def test_arrays_of_other_lengths(self, tmp_path):
        np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=np.zeros(4))
        problems(lambda: load_table(tmp_path / "t.npz", target="y"), "x 3, y 4")

    def test_inputs_that_are_not_finite(self, tmp_path):
        np.savez(tmp_path / "t.npz", x=np.full((2, 2), np.nan), y=np.zeros(2))
        call = lambda: load_table(tmp_path / "t.npz", target="y", classes=[0])  # noqa: E731
        problems(call, "not finite")

    def test_texts(self, table, tmp_path):
        both = {"ward": "text", "age": (0, 100)}
        problems(lambda: load_table(table, features=both, **OPTIONS), "the only feature")
        typo = {"ward": "texts"}
        problems(lambda: load_table(table, features=typo, **OPTIONS), "'texts' was declared")
        path = as_parquet(tmp_path / "t.parquet")
        numbers = {"age": "text"}
        problems(lambda: load_table(path, features=numbers, **OPTIONS), "no text in record 0")
        data = load_table(table, features={"ward": "text"}, **OPTIONS)
        problems(data.train.tensors, "the inputs are texts")

    def test_one_array_among_columns(self, tmp_path):
        np.savez(tmp_path / "t.npz", x=np.zeros((2, 2)), z=np.zeros(2), y=np.zeros(2))
        call = lambda: load_table(tmp_path / "t.npz", target="y", classes=[0])  # noqa: E731
        problems(call, "column x", "only feature")

    def test_without_pyarrow(self, tmp_path, monkeypatch):
        path = as_parquet(tmp_path / "t.parquet")
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        problems(lambda: load_table(path, target="outcome"), "pip install 'ownerwise[table]'")

    def test_nothing_left_for_inputs(self, tmp_path):
        path = write(tmp_path / "t.csv", "y\n1\n")
        problems(lambda: load_table(path, target="y"), "no column is left")

    def test_split(self, table):
        problems(lambda: load_table(table, test_share=1, **OPTIONS), "test_share 1")
