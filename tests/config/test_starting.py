"""`ownerwise init`: a configuration from the names of the columns alone."""

from __future__ import annotations

import tomllib

import pytest

from ownerwise.cli.main import main
from ownerwise.config import prepare_run, read_config
from ownerwise.config.placeholders import TODO
from ownerwise.errors import OwnerwiseError

HEADER = "patient,age,weight,ward,admitted,Jitter(%),outcome\n"
ROWS = "".join(
    f'P{n:03},{20 + n % 60},"{50 + n % 40},5 kg",{n % 3 + 1}.0,{1 + n % 28}.02.2020,'
    f"{'NA' if n % 5 == 0 else n / 100},{'ill' if n % 3 else 'well'}\n"
    for n in range(120)
)
SAID = {
    'classes = ["TODO"]': 'classes = ["well", "ill"]',
    '# missing = ["NA", -9]': 'missing = ["NA"]',
    'age = "TODO"': "age = [0, 110]",
    'weight = "TODO"': 'weight = { range = [2, 300], unit = "kg", decimal = "," }',
    'ward = "TODO"': "ward = { categories = [1, 2, 3] }",
    'admitted = "TODO"': 'admitted = { dates = [2010-01-01, 2026-12-31], format = "%d.%m.%Y" }',
    '"Jitter(%)" = "TODO"': '"Jitter(%)" = { range = [0, 2], logarithmic = true }',
    'budgets = "TODO"': 'budgets = "budgets.csv"',
    'unit = "TODO"': 'unit = "record"',
    'batch_size = "TODO"': "batch_size = 20",
    "steps = 200": "steps = 4",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "visits.csv").write_text(HEADER + ROWS)
    budgets = "".join(f"P{n:03},{1 + n % 4}\n" for n in range(120))
    (tmp_path / "budgets.csv").write_text(f"owner,epsilon\n{budgets}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(folder, **changes):
    text = (folder / "visits.toml").read_text()
    for blank, said in {**SAID, **changes}.items():
        assert blank in text, blank
        text = text.replace(blank, said, 1)
    (folder / "visits.toml").write_text(text)


def test_from_a_table_to_predictions(folder, capsys):
    assert main(["init", "visits.csv", "--target", "outcome"]) == 0
    assert "Only the names of the columns were read" in capsys.readouterr().out
    filled(folder)
    assert main(["train", "visits.toml"]) == 0
    assert "predicted" not in capsys.readouterr().out
    assert main(["predict", "runs/visits", "visits.csv", "--keep", "patient"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "patient,predicted,probability_well,probability_ill"
    assert len(lines) == 121


def test_with_statistics(folder, capsys):
    """The inputs, the model and the predictions change; new records get the run's statistics."""
    main(["init", "visits.csv", "--target", "outcome"])
    filled(folder, **{"# statistics = { share = 0.05 }": "statistics = { share = 0.05 }"})
    prepared = prepare_run(read_config("visits.toml"))
    assert prepared.plan.opening_std is not None
    assert prepared.data.numbers == 4
    assert prepared.data.features[:4] == ("age", "weight", "admitted", "Jitter(%)")
    assert main(["train", "visits.toml"]) == 0
    assert main(["predict", "runs/visits", "visits.csv", "--keep", "patient"]) == 0
    assert main(["train", "visits.toml", "--resume"]) == 0
    capsys.readouterr()
    assert main(["train", "visits.toml", "--set", "data.scale=ranges"]) == 2
    assert "leave out data.scale" in capsys.readouterr().err
    changes = ["--set", "plan.statistics=false", "--set", "data.scale=released"]
    assert main(["train", "visits.toml", *changes]) == 2
    assert "without plan.statistics" in capsys.readouterr().err


def test_everything_that_is_missing_is_listed_at_once(folder, capsys):
    main(["init", "visits.csv"])
    capsys.readouterr()
    assert main(["train", "visits.toml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ownerwise: 6 problems")
    for key in ("target", "classes", "features", "budgets", "unit", "batch_size"):
        assert f"{key} is still" in error or f"{key}: 'age'" in error, key
    assert "'Jitter(%)'" in error
    assert "expected" not in error  # no other problem follows from a blank
    assert not (folder / "runs").exists()


def test_other_problems_are_listed_with_them(folder, capsys):
    main(["init", "visits.csv"])
    capsys.readouterr()
    main(["train", "visits.toml", "--set", "training.lr=-1", "--set", "data.features.age=[9, 1]"])
    error = capsys.readouterr().err
    assert error.startswith("ownerwise: 8 problems")
    assert "feature age has range 9 to 1" in error


def test_it_does_not_depend_on_any_row(folder):
    """Not even on whether there is one."""
    texts = []
    for rows in (ROWS, "", "x" * 10**6, "a,b\n\x00\xff"):
        (folder / "visits.csv").write_text(HEADER + rows, encoding="latin-1")
        assert main(["init", "visits.csv", "--output", f"out{len(texts)}.toml"]) == 0
        text = (folder / f"out{len(texts)}.toml").read_text()
        texts.append(text.replace(f"out{len(texts)}", "out"))
    assert len(set(texts)) == 1
    assert tomllib.loads(texts[0])["data"]["owner"] == "patient"
    assert tomllib.loads(texts[0])["data"]["target"] == TODO


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("63.0,1.0,1.0,145.0", "contains numbers"),
        ("Anna,63,female", "contains numbers"),
        ("2020-01-01,yes,no", "contains numbers"),
        ("yes,no,yes", "a name twice"),
        ("age,,ward", "contains numbers, dates or empty cells"),
        ("age,?,ward", "contains numbers"),
        ("", "is empty"),
    ],
)
def test_a_first_line_that_may_be_a_record_is_not_copied(folder, capsys, first, words):
    (folder / "raw.csv").write_text(f"{first}\n{ROWS}" if first else "")
    assert main(["init", "raw.csv"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert not (folder / "raw.toml").exists()
    assert not any(cell in error for cell in first.split(",") if len(cell) > 3)


def test_names_are_escaped(folder):
    (folder / "odd.csv").write_text('a"b,c\\d,e=f,über,x\ty,# not\n')
    assert main(["init", "odd.csv"]) == 0
    found = tomllib.loads((folder / "odd.toml").read_text())
    assert list(found["data"]["features"]) == ['a"b', "c\\d", "e=f", "über", "x\ty", "# not"]


def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"age": [1], "secret": ["Anna"]}), folder / "v.parquet")
    assert main(["init", "v.parquet"]) == 0
    assert "Anna" not in (folder / "v.toml").read_text()


def test_files_and_columns_that_are_not_there(folder, capsys):
    assert main(["init", "nothing.csv"]) == 2
    (folder / "visits.xls").write_bytes(b"\xd0\xcf")
    assert main(["init", "visits.xls", "--output", "sheet.toml"]) == 2
    assert "expected .csv or .parquet: save the sheet as CSV" in capsys.readouterr().err
    assert main(["init", "visits.csv", "--target", "outcom", "--owner", "who"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'outcome'" in error
    assert "no column 'who'" in error
    (folder / "visits.toml").write_text("kept")
    assert main(["init", "visits.csv"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (folder / "visits.toml").read_text() == "kept"


def test_the_table_may_be_in_another_folder(folder):
    (folder / "sub").mkdir()
    assert main(["init", "visits.csv", "--output", "sub/run.toml"]) == 0
    assert tomllib.loads((folder / "sub" / "run.toml").read_text())["data"]["file"] == (
        "../visits.csv"
    )


def test_a_target_among_the_features_is_refused(folder):
    main(["init", "visits.csv", "--target", "outcome"])
    filled(folder, **{"[owners]": 'outcome = ["well", "ill"]\n\n[owners]'})
    with pytest.raises(OwnerwiseError, match="is the target and a feature"):
        prepare_run(read_config("visits.toml"))
