"""A numeric target from configuration to report: training, metrics, card, prediction, refusals."""

import csv
import json
import re

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.config import prepare_run
from ownerwise.config.reading import make_config
from ownerwise.data import load_table
from ownerwise.errors import OwnerwiseError
from ownerwise.report import write_report
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

CONFIG = """
[data]
file = "visits.csv"
target = "cost"
target_range = [0, 100]
owner = "clinic"
features = { age = [0, 100], ward = ["day", "night"] }

[owners]
named = true
epsilon = { east = 2.0, west = 8.0 }

[plan]
epochs = 8
batch_size = 40
clip_norm = { quantile = 0.8 }

[model]
name = "mlp"
hidden = []

[training]
lr = 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table whose target follows from its inputs, its configuration, and a run on it."""
    place = tmp_path_factory.mktemp("regression")
    generator = np.random.default_rng(0)
    with (place / "visits.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["clinic", "age", "ward", "cost"])
        for at in range(500):
            age, ward = generator.integers(0, 100), ("day", "night")[at % 2]
            cost = 0.6 * age + 20 * (at % 2) + generator.normal(0, 3)
            writer.writerow([("east", "west")[at % 5 > 0], age, ward, f"{cost:.2f}"])
    (place / "cost.toml").write_text(CONFIG)
    assert main(["train", str(place / "cost.toml"), "--folder", str(place / "run")]) == 0
    return place


def test_errors_are_measured_in_the_targets_units(folder):
    run = ow.Run.load(folder / "run")
    last = run.history[-1]
    assert run.plan.steps == round(8 * run.plan.total_records / 40)
    metrics = last["validation"]
    assert metrics["trivial_rmse"] > 15
    assert metrics["rmse"] < 0.6 * metrics["trivial_rmse"]
    assert metrics["r2"] > 0.6
    assert metrics["groups"].keys() == {"east", "west"}
    assert last["steering"]["clip_norm"] != 1
    assert run.problems == []
    assert run.config["regression"] == {"range": [0.0, 100.0], "loss": "mse_loss"}


def test_report_and_card_say_errors_and_nothing_about_classes(folder, tmp_path):
    run = ow.Run.load(folder / "run")
    rmse = run.history[-1]["validation"]["rmse"]
    card = (folder / "run/CARD.md").read_text()
    assert f"| RMSE | {rmse:.5g} |" in card
    assert "the 0.8 quantile of the gradient norms" in card
    assert "one number that shows how many gradients are within the clip norm" in card
    html = (folder / "run/report.html").read_text()
    assert f"{rmse:.4g}" in html
    assert html.count("is about classes, but the runs predict numbers.") == 3
    text = re.sub(r"<script.*?</script>|<li>[^<]*</li>", "", html, flags=re.DOTALL)
    assert "RMSE of the mean alone" in text
    for word in ("accuracy", "recall"):
        assert word not in card.lower()
        assert word not in text.lower()
    with pytest.raises(OwnerwiseError, match="write a report on each kind"):
        write_report([run, _classifier(tmp_path)], tmp_path / "both.html")


def _classifier(tmp_path):
    import torch

    data = torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))
    return ow.Trainer(tools.mlp(), tools.make_plan(), lr=0.1, seed=0).fit(data)


def test_new_records_are_predicted_in_the_targets_units(folder, capsys):
    new = folder / "new.csv"
    new.write_text("id,age,ward,clinic\n1,10,day,east\n2,90,night,west\n")
    capsys.readouterr()
    assert main(["predict", str(folder / "run"), str(new), "--keep", "id"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert rows[0].keys() == {"id", "predicted"}
    low, high = (float(row["predicted"]) for row in rows)
    assert low == pytest.approx(6, abs=12)
    assert high == pytest.approx(74, abs=12)
    counts = folder / "counts.csv"
    counts.write_text("owner,a\neast,3\n")
    assert main(["predict", str(folder / "run"), str(new), "--repair", str(counts)]) == 2
    assert "applies to classes, but this run predicts a number" in capsys.readouterr().err


def test_the_summary_of_training_names_the_trivial_prediction(folder, capsys):
    config = str(folder / "cost.toml")
    main(["train", config, "--folder", str(folder / "again"), "--set", "run.seed=1"])
    out = capsys.readouterr().out
    assert re.search(r"validation RMSE [\d.]+, MAE [\d.]+, R2 0\.\d+ \(RMSE of the mean alone", out)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.target_range=[5, 5]"], "two finite numbers with low < high"),
        (["data.classes=[1, 2]"], "data.classes with data.target_range: it applies to classes"),
        (["plan.calibration=true"], "plan.calibration with data.target_range"),
        (["training.loss=cross_entropy"], "is 'cross_entropy' with data.target_range"),
        (["plan.steps=5"], "epochs 8 and 5 steps were both given"),
        (["plan.clip_norm={quantil = 0.5}"], "quantil is unknown; did you mean 'quantile'"),
    ],
)
def test_wrong_configurations_are_explained(folder, capsys, changes, words):
    options = [word for change in changes for word in ("--set", change)]
    assert main(["train", str(folder / "cost.toml"), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_numeric_loss_needs_the_range():
    sections = {"data": {"name": "digits"}, "training": {"lr": 1.0, "loss": "mse_loss"}}
    with pytest.raises(OwnerwiseError, match=r"'mse_loss' needs data\.target_range, the public"):
        make_config(sections)


def test_cells_without_a_number_are_named(folder, tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("age,cost\n1,12.5\n2,\n3,inf\n4,high\n")
    with pytest.raises(OwnerwiseError, match="column cost: no finite number in record 1, 2, 3;"):
        load_table(path, target="cost", target_range=(0, 100), test_share=None)
    data = load_table(folder / "visits.csv", target="cost", target_range=(0, 100),
                      features=["age"])  # fmt: skip
    assert data.classes == ()
    assert data.train.targets.dtype == np.float32
    assert "a numeric target" in repr(data)


def test_a_resumed_run_is_the_same_run(folder, tmp_path):
    """A finished regression is resumed without another step."""
    sections = json.loads(json.dumps(_sections(CONFIG)))
    config = make_config(sections, folder, "cost")
    prepared = prepare_run(config, folder=folder / "run", resume=True, progress=False)
    run = prepared.fit(resume=True)
    assert run.steps_spent == run.plan.steps


def _sections(text):
    import tomllib

    return tomllib.loads(text)
