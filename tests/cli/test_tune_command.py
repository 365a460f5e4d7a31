"""`ownerwise tune`: one run folder, one line about the search, and all problems at once."""

import csv
import json

import numpy as np
import pytest

from ownerwise.cli.main import main
from ownerwise.runs import Run
from ownerwise.tuning import trials

CONFIG = """
[data]
file = "table.csv"
target = "y"
owner = "owner"
features = { a = [-3, 3], b = [-3, 3] }
classes = [0, 1]
validation_share = 0.2
[owners]
budgets = "budgets.csv"
[plan]
steps = 20
batch_size = 300
[model]
name = "mlp"
hidden = [4]
[training]
lr = 0.5
[tuning]
space = { training.lr = [0.1, 2.0] }
runs = 2
"""


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    with (tmp_path / "table.csv").open("w") as file:
        write = csv.writer(file).writerow
        write(["owner", "a", "b", "y"])
        for row in range(800):
            a, b = rng.normal(size=2).clip(-3, 3).round(3)
            write([f"p{row % 80:03}", a, b, int(a > b)])
    with (tmp_path / "budgets.csv").open("w") as file:
        write = csv.writer(file).writerow
        write(["owner", "epsilon"])
        for owner in range(80):
            write([f"p{owner:03}", (2, 4)[owner % 2]])
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


def tune(config, *arguments):
    return main(["tune", str(config), "--folder", str(config.parent / "run"), *arguments])


def test_a_search_leaves_one_run_that_can_predict(config, capsys, monkeypatch):
    made = []
    original = trials._Trial.make
    monkeypatch.setattr(trials._Trial, "make", lambda self: made.append(original(self)))
    assert tune(config) == 0
    shown = capsys.readouterr()
    run = Run.load(config.parent / "run")
    assert run.plan.tuning.score_std is not None
    assert (run.epsilon() <= run.plan.targets).all()
    assert "tuning: paid (the best of a secret random number of runs" in shown.out
    assert "how many runs are made, and which, stays secret" in shown.out
    assert "tuning: paid" in (config.parent / "run" / "CARD.md").read_text()
    assert "tuning: paid" in (config.parent / "run" / "report.html").read_text()
    assert set(run.predict(np.zeros((3, 2), dtype=np.float32))) <= {"0", "1"}
    assert run.history[-1]["validation"] is None  # these records are private
    assert tune(config) == 2  # the folder holds a run
    assert made


def test_json_is_all_that_is_printed(config, capsys):
    assert tune(config, "--json", "--set", "tuning.score=public") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tuning"].startswith("tuning: paid")
    assert printed["epsilon_spent"]["largest"] <= 4


def test_all_problems_are_listed(config, capsys):
    changes = [
        "tuning.space={training.lr=[0.1, 0.2], data.file=[1, 2]}",
        'tuning.law="normal"',
        'tuning.score="public"',
        "tuning.score_std=3",
    ]
    assert tune(config, *(part for change in changes for part in ("--set", change))) == 2
    text = capsys.readouterr().err
    for part in ("'data.file'", "tuning.law is 'normal'", "score_std with score = 'public'"):
        assert part in text
    assert tune(config, "--set", "tuning.space={training.lr=[0.1, -2]}") == 2
    assert "candidate 2: training.lr" in capsys.readouterr().err
    assert main(["train", str(config)]) == 2
    assert "run `ownerwise tune`" in capsys.readouterr().err
