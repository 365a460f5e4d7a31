"""No message, file or report shows the value of a private cell.

The attack: put a token into a cell that is then complained about, and look for it in everything
that is printed or written. The rule stands in docs/pitfalls.md: a message may say in which record
or line something is wrong; the value stays in the table. Names of owners and columns are public.
"""

import re
import traceback

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.data import DataSet, Pictures, Records, load_table
from ownerwise.data.features import class_of
from ownerwise.data.reading import by_column, read_rows, reading
from ownerwise.errors import OwnerwiseError
from ownerwise.estimators import PrivateClassifier
from ownerwise.mechanisms.constraints import Partition

SECRET = "s3cr3t-t0k3n"
NUMBER = 731_904_257
OPTIONS = {
    "target": "outcome", "owner": "clinic", "classes": ["home", "admitted"],
    "features": {"age": (0, 110), "ward": ["day", "night"]}, "test_share": None,
}  # fmt: skip


def table(folder, column=None, value=SECRET, rows=30):
    """Write a table in which one cell of a column holds a value."""
    header = ["clinic", "age", "ward", "outcome"]
    lines = [
        {"clinic": "north", "age": str(20 + k), "ward": "day", "outcome": "home"}
        for k in range(rows)
    ]
    if column:
        lines[7][column] = value
    path = folder / "visits.csv"
    text = "\n".join(",".join(line[name] for name in header) for line in lines)
    path.write_text(",".join(header) + "\n" + text + "\n")
    return path


def refusal(call):
    """Return everything a failing call shows: the message and the whole traceback."""
    with pytest.raises(OwnerwiseError) as error:
        call()
    return "".join(traceback.format_exception(error.value, limit=0)) + str(error.value.problems)


@pytest.mark.parametrize("column", ["age", "ward", "outcome"])
def test_a_cell_that_does_not_fit_the_schema(tmp_path, column):
    path = table(tmp_path, column)
    shown = refusal(lambda: load_table(path, **OPTIONS))
    assert SECRET not in shown
    assert column in shown
    assert "record 7" in shown


@pytest.mark.parametrize("value", ["inf", "-inf", "1e999"])
def test_a_number_that_is_not_finite(tmp_path, value):
    shown = refusal(lambda: load_table(table(tmp_path, "age", value), **OPTIONS))
    assert value not in shown
    assert "record 7" in shown


def test_a_column_without_declared_categories(tmp_path):
    path = table(tmp_path, "ward")
    options = OPTIONS | {"features": ["age", "ward"]}
    shown = refusal(lambda: load_table(path, **options))
    assert SECRET not in shown
    assert "'day'" not in shown
    assert "categories" in shown


def test_gaps_are_not_counted(tmp_path):
    path = table(tmp_path, "age", "")
    shown = refusal(lambda: load_table(path, **OPTIONS | {"features": ["age"]}))
    assert "missing" in shown
    assert "1 values" not in shown


def test_cells_of_a_parquet_file_and_an_archive(tmp_path):
    cells = {"clinic": ["a", "b"], "age": [3, NUMBER], "ward": ["day", SECRET]}
    parquet.write_table(pa.table(cells | {"outcome": ["home", SECRET]}), tmp_path / "t.parquet")
    shown = refusal(lambda: load_table(tmp_path / "t.parquet", **OPTIONS))
    np.savez(tmp_path / "t.npz", x=np.ones((2, 3)), y=np.array([0, NUMBER]))
    options = {"target": "y", "classes": [0, 1], "test_share": None}
    shown += refusal(lambda: load_table(tmp_path / "t.npz", **options))
    assert SECRET not in shown
    assert str(NUMBER) not in shown


def test_pictures_are_not_named(tmp_path):
    (tmp_path / f"{SECRET}.png").write_bytes(b"no picture")
    Image.new("L", (2, 2)).save(tmp_path / "good.png")
    options = {"target": "ill", "classes": [0, 1], "features": {"file": Pictures()}}
    for name in (f"{SECRET}.png", f"{SECRET}-missing.png"):
        (tmp_path / "list.txt").write_text(f"2\nill\ngood.png 0\n{name} 1\n")
        shown = refusal(lambda: load_table(tmp_path / "list.txt", **options))
        assert SECRET not in shown
        assert "record 1" in shown


def test_what_a_parser_says_is_not_repeated(tmp_path):
    path = tmp_path / "t.csv"

    def parse():
        with reading(path, "numbers"):
            return np.array([SECRET], dtype=np.float64)

    assert SECRET not in refusal(parse)
    path.write_text(f'a,b\n1,2\n3,"{SECRET}"x\n')
    assert SECRET not in refusal(lambda: read_rows(path))
    path.write_text(f"a,b\n1,2\n3,{SECRET},4\n")
    assert SECRET not in refusal(lambda: read_rows(path))
    assert SECRET not in refusal(lambda: by_column(path, [["1"], [SECRET, "2"]], ["a"]))
    (tmp_path / "list.txt").write_text(f"{SECRET}\nill\ngood.png 0\n")
    assert SECRET not in refusal(lambda: load_table(tmp_path / "list.txt", target="ill"))


def test_targets_and_labels():
    assert SECRET not in refusal(lambda: class_of(["a", SECRET], ["a"], "column y"))
    strange = np.array([0, NUMBER])
    records = Records(np.ones((2, 1), np.float32), strange)
    assert str(NUMBER) not in refusal(lambda: DataSet("x", records, None, ("a",)))
    labels = np.array(["a", "b"] * 20, dtype=object)
    labels[3] = SECRET
    estimator = PrivateClassifier(classes=["a", "b"])
    assert SECRET not in refusal(lambda: estimator.fit(np.ones((40, 2)), labels))
    partition = Partition({"sex": ("f", "m")}, classes=2)
    shown = refusal(lambda: partition.targets([0, 1], {"sex": ["f", SECRET]}))
    assert SECRET not in shown
    assert "record 1" in shown


def test_numbers_of_records_that_differ_from_the_declared_ones():
    owners = ow.Owners(["a"] * 5 + ["b"], {"a": 1.0, "b": 1.0}, 1e-3, records={"a": 9, "b": 9})
    plan = ow.plan(owners, steps=2, batch_size=2)
    trainer = ow.Trainer(torch.nn.Linear(2, 2), plan, lr=0.1)
    shown = refusal(lambda: trainer.fit((torch.ones(7, 2), torch.zeros(7, dtype=torch.long))))
    assert "not private" in shown or "7" not in shown
    shown = refusal(lambda: ow.Owners(["a", "b", "b", "b"], {"a": 1.0}))
    assert "3" not in shown


@pytest.mark.filterwarnings("always:the number of training records")
def test_training_prints_and_writes_no_cell_and_no_count(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = 613  # the training part has fewer
    path = table(tmp_path, rows=rows)
    ages = path.read_text().replace("north,27,", f"north,{NUMBER},")
    path.write_text(ages)
    budgets = "owner,epsilon,records\nnorth,3.0,500\n"
    (tmp_path / "budgets.csv").write_text(budgets)
    (tmp_path / "run.toml").write_text(
        """
        [data]
        file = "visits.csv"
        target = "outcome"
        owner = "clinic"
        classes = ["home", "admitted"]
        features = { age = [0, 110], ward = ["day", "night"] }
        [owners]
        budgets = "budgets.csv"
        [plan]
        steps = 4
        batch_size = 50
        [model]
        name = "mlp"
        [training]
        lr = 0.1
        """
    )
    loaded = load_table(
        path, target="outcome", owner="clinic", classes=["home", "admitted"],
        features=OPTIONS["features"],
    )  # fmt: skip
    count = str(len(loaded.train))
    assert count != "500"
    # As a number of its own: the same digits may stand within a random id or another number.
    alone = re.compile(rf"(?<![\w.]){count}(?!\w|\.\d)")
    assert main(["train", "run.toml", "--folder", "out"]) == 0
    output = capsys.readouterr()
    assert not alone.search(output.out)
    assert not alone.search(repr(loaded) + repr(loaded.train))
    warned = [line for line in output.err.splitlines() if alone.search(line)]
    assert all("not private" in line for line in warned)
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert str(NUMBER).encode() not in content, file.name
            if file.suffix in (".json", ".md"):
                assert not alone.search(content.decode()), file.name
