"""`ownerwise predict` on a real table, from training to the file of predictions."""

from __future__ import annotations

import csv
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.config import prepare_run, read_inputs
from ownerwise.config.reading import make_config
from tools import step_tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

EXAMPLES = Path(__file__).parents[2] / "examples"
FEATURES = {
    "age": [0, 110],
    "pulse": [30, 200],
    "pressure": [60, 240],
    "ward": ["day", "night", "emergency"],
}
COUNTS = (
    "owner,admitted,home\norchard,190,110\nharbour,200,300\nlakeside,190,400\nnorthfield,280,520\n"
)
BY_BUDGET = "epsilon,home,admitted\n1,110,190\n2,300,200\n4,400,190\n8,520,280\n"
CONFIG = {
    "run": {"seed": 1},
    "data": {
        "file": "visits.csv", "target": "outcome", "owner": "clinic", "features": FEATURES,
        "classes": ["home", "admitted"],
    },
    "owners": {"epsilon": {"orchard": 1.0, "harbour": 2.0, "lakeside": 4.0, "northfield": 8.0}},
    "plan": {"steps": 12, "batch_size": 200},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"lr": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the table, published counts, new records and two trained runs."""
    folder = tmp_path_factory.mktemp("visits")
    shutil.copy(EXAMPLES / "visits.csv", folder)
    (folder / "counts.csv").write_text(COUNTS)
    (folder / "budgets.csv").write_text(BY_BUDGET)
    (folder / "new.csv").write_text(
        "id,ward,pressure,pulse,age\n007,night,130,80,42\n8,emergency,150,110,71\n9,,120,70,-5\n"
    )
    training = {"lr": 1.0, "repair": {"counts": "counts.csv", "tau": 1.0}}
    for name, changed in (("plain", CONFIG), ("adjusted", CONFIG | {"training": training})):
        prepare_run(make_config(changed, folder, name), folder=folder / name, progress=False).fit()
    return folder


def predict(place, *arguments):
    return main(["predict", *map(str, arguments)])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def slow_inputs():
    """The three new records, encoded by hand: declared ranges to [-1, 1], categories to 0 or 1."""
    records = [("night", 130, 80, 42), ("emergency", 150, 110, 71), ("", 120, 70, 0)]
    encoded = []
    for ward, pressure, pulse, age in records:
        numbers = [
            2 * (value - low) / (high - low) - 1
            for value, (low, high) in ((age, (0, 110)), (pulse, (30, 200)), (pressure, (60, 240)))
        ]
        encoded.append([*numbers, *(float(ward == name) for name in FEATURES["ward"])])
    return torch.tensor(encoded)


def test_predictions_are_those_of_the_stored_model_on_inputs_encoded_by_hand(place, capsys):
    out = place / "out" / "predictions.csv"
    assert predict(place, place / "plain", place / "new.csv", "--keep", "id", "--output", out) == 0
    captured = capsys.readouterr()
    assert captured.out == f"Written to {out}.\n"
    assert "the model is NOT PRIVATE: fixed seed 1" in captured.err
    model = ow.models.mlp(6, 2, (4,))
    run = ow.Run.load(place / "plain", model=model)
    assert run.classes == ["home", "admitted"]
    with torch.no_grad():
        expected = model(slow_inputs()).double().softmax(dim=1).numpy()
    found = rows(out)
    assert [row["id"] for row in found] == ["007", "8", "9"]
    names = ("probability_home", "probability_admitted")
    chances = np.array([[float(row[name]) for name in names] for row in found])
    np.testing.assert_allclose(chances, expected, atol=2e-6)
    assert [row["predicted"] for row in found] == [run.classes[at] for at in expected.argmax(1)]
    assert run.predict(slow_inputs()).tolist() == [row["predicted"] for row in found]
    assert list(out.parent.iterdir()) == [out]


def test_without_a_file_the_table_is_printed(place, capsys):
    """The class and the owner may be in the table; they are not used."""
    assert predict(place, place / "plain", place / "visits.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "predicted,probability_home,probability_admitted"
    assert len(lines) == len((place / "visits.csv").read_text().splitlines())


def test_a_repair_from_counts_per_owner_or_per_budget(place, tmp_path, capsys):
    run = ow.Run.load(place / "plain")
    counts = [[300, 200], [400, 190], [520, 280], [110, 190]]  # by sorted id
    repair = ow.PullAdjustment(tau=2.0, counts=counts, aim="balanced")
    expected = run.predict_proba(slow_inputs(), repair=repair)
    for file in ("counts.csv", "budgets.csv"):
        out = tmp_path / file
        assert predict(
            place, place / "plain", place / "new.csv", "--keep", "id", "--repair", place / file,
            "--tau", 2, "--aim", "balanced", "--output", out,
        ) == 0  # fmt: skip
        found = [float(row["probability_admitted"]) for row in rows(out)]
        np.testing.assert_allclose(found, expected[:, 1], atol=2e-6)
    assert np.abs(run.predict_proba(slow_inputs()) - expected).max() > 0.05


def test_a_configured_repair_is_trained_in_and_not_applied_twice(place, capsys):
    run = ow.Run.load(place / "adjusted")
    assert run.config["repair"]["tau"] == 1.0
    assert run.label == "IDP-SGD adjusted"
    assert not np.array_equal(
        run.predict_proba(slow_inputs()), ow.Run.load(place / "plain").predict_proba(slow_inputs())
    )
    shown = []
    for options in ((), ("--repair", place / "counts.csv")):
        predict(place, place / "adjusted", place / "new.csv", "--keep", "id", *options)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_columns_that_training_left_out_are_left_out_of_predictions(place, capsys):
    """The table that the run was trained on has further columns, and can be predicted as it is."""
    header, *body = (place / "new.csv").read_text().splitlines()
    wide = place / "wide.csv"
    wide.write_text("\n".join([f"note,{header},outcome", *(f"x,{row},ill" for row in body)]))
    shown = []
    for name in ("new.csv", "wide.csv"):
        assert predict(place, place / "plain", place / name, "--keep", "id") == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_all_problems_are_listed_and_nothing_is_written(place, tmp_path, capsys):
    table = tmp_path / "bad.csv"
    table.write_text("age,pulze,wing,ward\n40,80,a,night\n")
    code = predict(
        place, place / "plain", table, "--keep", "id", "--repair", tmp_path / "none.csv",
        "--output", tmp_path,
    )  # fmt: skip
    assert code == 2
    error = capsys.readouterr().err
    assert "3 problems" in error
    assert "no file" in error
    assert (
        "bad.csv has no column 'pulse' (did you mean 'pulze'?), 'pressure', 'id'; expected the "
        "columns 'age', 'pulse', 'pressure', 'ward', 'id' and any others: rename or add columns"
    ) in error
    assert "is a folder; expected a file name" in error
    assert predict(place, place / "plain", place / "new.csv", "--keep", "id", "--tau", 2) == 2
    assert "--tau needs --repair COUNTS" in capsys.readouterr().err
    table.write_text("age,pulse,pressure,ward\n40,fast,100,night\n40,80,100,roof\n")
    out = tmp_path / "out.csv"
    assert predict(place, place / "plain", table, "--output", out) == 2
    error = capsys.readouterr().err
    assert "column pulse: no finite number in record 0" in error
    assert "column ward: the value in record 1 is not in the declared list" in error
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


def test_a_write_that_fails_leaves_the_old_file(place, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.csv"
    out.write_text("old")

    def full(path, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert predict(place, place / "plain", place / "new.csv", "--keep", "id", "--output", out) == 2
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_runs_whose_preprocessing_is_unknown_are_refused(place, capsys):
    run = ow.Run.load(place / "plain")
    named = {**run.config, "settings": {**run.config["settings"], "data": {"name": "digits"}}}
    with pytest.raises(ow.OwnerwiseError, match="not made from a configuration that names a table"):
        read_inputs(named, place / "new.csv")
    data = {**run.config["settings"]["data"], "scale": "statistics"}
    scaled = {**run.config, "settings": {**run.config["settings"], "data": data}}
    with pytest.raises(ow.OwnerwiseError, match="statistics of the training records"):
        read_inputs(scaled, place / "new.csv")
    assert predict(place, place / "nowhere", place / "new.csv") == 2
    assert "no config.json" in capsys.readouterr().err


def test_undeclared_columns_are_remembered_in_order(place, tmp_path):
    text = "b,y,a,who\n" + "".join(f"{n % 5},{n % 2},{n % 7},{n % 2}\n" for n in range(80))
    (tmp_path / "t.csv").write_text(text)
    changed = CONFIG | {
        "data": {"file": "t.csv", "target": "y", "owner": "who", "classes": [0, 1]},
        "owners": {"epsilon": {"0": 1.0, "1": 4.0}},
        "plan": {"steps": 2, "batch_size": 20},
    }
    prepare_run(make_config(changed, tmp_path), folder=tmp_path / "run", progress=False).fit()
    run = ow.Run.load(tmp_path / "run")
    (tmp_path / "new.csv").write_text("a,b\n6,1\n2,3\n")
    expected = run.predict_proba(torch.tensor([[1.0, 6.0], [3.0, 2.0]]))
    np.testing.assert_allclose(run.predict_proba(tmp_path / "new.csv"), expected)
    assert set(run.predict(tmp_path / "new.csv").tolist()) <= {"0", "1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("repair = true", "training.repair is True; expected a table"),
        ("repair = { tau = 1 }", "training.repair.counts is None; expected the path"),
        ('repair = { counts = "c.csv", tua = 1 }', "did you mean 'tau'"),
        ('repair = { counts = "c.csv", name = "push" }', "training.repair.name is 'push'"),
    ],
)
def test_a_configured_repair_is_checked(given, message):
    training = {"lr": 1.0, **tomllib.loads(given)}
    with pytest.raises(ow.OwnerwiseError, match=message):
        make_config(CONFIG | {"training": training})


def test_problems_of_the_counts_are_named_with_others(place):
    training = {"lr": 1.0, "repair": {"counts": "nowhere.csv"}}
    config = make_config(CONFIG | {"training": training}, place)
    with pytest.raises(ow.OwnerwiseError, match=r"no file .*nowhere\.csv; expected a CSV table"):
        prepare_run(config, folder=place / "other")


def test_resuming_with_another_repair_is_refused(place):
    training = {"lr": 1.0, "repair": {"counts": "counts.csv", "tau": 0.5}}
    config = make_config(CONFIG | {"training": training}, place, "adjusted")
    prepared = prepare_run(config, folder=place / "adjusted", resume=True, progress=False)
    with pytest.raises(ow.OwnerwiseError, match=r"repair\.tau was 1\.0 and is now 0\.5"):
        prepared.fit(resume=True)
