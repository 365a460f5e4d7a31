"""Mistakes that users make first, each with the message that helps, before any budget is spent."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.config import build
from ownerwise.runs import Run
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)
X, Y = torch.randn(tools.RECORDS, 4), torch.randint(0, 3, (tools.RECORDS,))
EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"
QUICK = ["--set", "plan.steps=12", "--set", "run.seed=1", "--set", "plan.method=uniform"]


def own_loop(step, data):
    """Take the first step of an own loop."""
    for batch in ow.PoissonBatches(data, step.plan, stream=tools.seeded()):
        step(batch)
        break


@pytest.mark.parametrize(
    ("data", "loss", "words"),
    [
        ((X.double(), Y), functional.cross_entropy, r"needs X\.float\(\)"),
        ((X.double().numpy(), Y), functional.cross_entropy, r"\.astype\('float32'\)"),
        ((X.long(), Y), functional.cross_entropy, r"needs X\.float\(\)"),
        ((X, Y.float()), functional.cross_entropy, r"expected classes, int64 .*pass y\.long\(\)"),
        ((X, Y.int()), functional.cross_entropy, r"pass y\.long\(\)"),
        ((X, Y[:, None]), functional.cross_entropy, r"pass y\.squeeze\(1\)"),
        ((X, functional.one_hot(Y, 3)), functional.cross_entropy, r"pass y\.argmax\(1\)"),
        ((X, Y), functional.binary_cross_entropy_with_logits, "expected float32"),
        ((X, Y.float()), functional.mse_loss, "give the model as many outputs"),
        ((X, Y.float()), ow.RegressionLoss(0, 2), "give the model a single output"),
    ],
)
def test_wrong_types_in_an_own_loop_get_the_trainers_message(data, loss, words):
    """The same words as from the Trainer, and no step is spent. Pitfall 14."""
    step = tools.make_step(tools.mlp(), loss)
    with pytest.raises(ow.OwnerwiseError, match=words) as of_step:
        own_loop(step, data)
    assert step.steps_spent == 0
    trainer = ow.Trainer(tools.mlp(), tools.make_plan(), lr=0.1, loss=loss, seed=0)
    with pytest.raises(ow.OwnerwiseError) as of_trainer:
        trainer.fit(data)
    stated = [text.removeprefix("the data: ") for text in of_trainer.value.problems]
    assert set(of_step.value.problems) <= set(stated)


def test_step_of_x_and_y_and_other_things_that_are_no_batch():
    step = tools.make_step(tools.mlp(), functional.cross_entropy)
    with pytest.raises(ow.OwnerwiseError, match="got 2 arguments; expected a Batch, as in `for"):
        step(X, Y)
    with pytest.raises(ow.OwnerwiseError, match="got a tuple; expected a Batch"):
        step((X, Y))
    with pytest.raises(ow.OwnerwiseError, match="which a DataLoader does not"):
        step(X)
    assert step.steps_spent == 0


def test_the_first_check_changes_nothing_about_the_run():
    """The trial on dummies moves neither parameters nor buffers nor random numbers."""
    found = []
    for tried in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        step = tools.make_step(model, functional.cross_entropy)
        step._tried = tried
        for number in range(2):
            step(tools.batch_of(X[:12], Y[:12], number))
        found.append(torch.cat([tools.weights_of(model), torch.rand(1).double()]))
    assert torch.equal(*found)


def test_a_folder_with_a_run_is_refused_before_any_work(tmp_path, capsys, monkeypatch):
    folder = ["--folder", str(tmp_path / "run")]
    assert main(["train", str(EXAMPLE), *folder, *QUICK, "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    monkeypatch.setattr(build, "load_data", lambda *_: pytest.fail("data was loaded"))
    assert main(["train", str(EXAMPLE), *folder, *QUICK]) == 2
    assert "already contains a run; resume it (resume=True, or --resume)" in capsys.readouterr().err


def test_one_mistake_about_the_unit_is_one_problem(tmp_path, capsys):
    run = ["train", str(EXAMPLE), "--folder", str(tmp_path / "run")]
    assert main([*run, "--set", 'plan.unit="patient"']) == 2
    error = capsys.readouterr().err
    assert "unit is 'patient'" in error
    assert "sampling" not in error
    assert main([*run, "--set", 'plan.unit="owner"', "--set", 'plan.sampling="visit"']) == 2
    assert "sampling is 'visit'" in capsys.readouterr().err


def test_the_last_lines_compare_with_the_most_frequent_answer(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", str(EXAMPLE), "--folder", str(folder), *QUICK]) == 0
    run = Run.load(folder)
    last = run.history[-1]["test"]
    majority = last["classification"]["majority"]
    line = f"accuracy {last['accuracy']:.4f} (always '{run.classes[int(majority['class'])]}': "
    assert f"{line}{majority['share']:.4f})" in capsys.readouterr().out


def test_json_of_a_run_and_of_a_report(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", str(EXAMPLE), "--folder", str(folder), *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = Run.load(folder)
    assert found["last"] == run.history[-1]
    assert found["epsilon_spent"]["largest"] == pytest.approx(float(run.epsilon().max()))
    assert (found["private"], found["not_private"]) == (False, ["fixed seed 1"])
    assert found["classes"] == run.classes
    out = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(out), "runs": [found]}
    assert main(["report", str(folder), "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_epochs_follow_from_public_counts():
    declared = ow.Owners(None, {"a": 1.0, "b": 2.0}, records={"a": 300, "b": 100})
    assert ow.plan(declared, epochs=3, batch_size=40).steps == 30
    assert ow.plan(declared, epochs=0.01, batch_size=40).steps == 1
    schedule = ow.plan(declared, epochs=3, batch_size=40, noise_schedule="step").schedule
    assert schedule.steps == 30
    owner = np.repeat(["a", "b", "c"], 20)
    by_owner = ow.plan(ow.Owners(owner, 2.0), unit="owner", epochs=6, batch_size=1)
    assert by_owner.steps == 18


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 3, "steps": 5, "batch_size": 9}, "epochs 3 and 5 steps were both given"),
        ({"epochs": 3, "noise_multiplier": 2.0}, "epochs 3 without batch_size: expected both"),
        ({"epochs": 0, "batch_size": 9}, "epochs 0: expected a positive finite number"),
        ({"epochs": "2", "batch_size": 9}, "epochs '2': expected a positive finite number"),
        ({"epochs": 1e9, "batch_size": 1}, "steps 60000000000: expected a whole number from 1 to"),
        ({"epochs": 2, "noise_schedule": [(5, 1.0)], "batch_size": 9}, "and 5 steps were both"),
    ],
)
def test_epochs_that_cannot_be_used(options, words):
    with pytest.raises(ow.PlanError, match=words):
        ow.plan(tools.owners(), **options)


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_come_at_once(option):
    """At most 0.3 s of CPU at best, however busy the machine, and without loading torch."""
    spent = []
    for _ in range(3):
        before = _children()
        command = [sys.executable, "-m", "ownerwise", option]
        assert subprocess.run(command, capture_output=True, check=True).stdout
        spent.append(_children() - before)
        time.sleep(0)
    assert min(spent) < 0.3
    code = f"import sys\nfrom ownerwise.cli.main import main\ntry: main(['{option}'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.splitlines()[-1] == "False"


def test_a_network_of_ones_own_in_the_configuration(tmp_path, capsys):
    """`module:Name`, with options, from a file beside the configuration, also for predictions."""
    (tmp_path / "my_nets_here.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, inputs, classes, width=3):\n"
        "        layers = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)\n"
        "        super().__init__(nn.Flatten(), *layers)\n"
    )
    config = tmp_path / "own.toml"
    text = EXAMPLE.read_text().replace('"mlp" ', '"my_nets_here:Net" ')
    text = text.replace("hidden = [64]\n", "width = 5\n").replace('activation = "tanh"\n', "")
    config.write_text(text)
    assert main(["train", str(config), "--folder", str(tmp_path / "run"), *QUICK, "-q"]) == 0
    run = Run.load(tmp_path / "run")
    assert run.predict(torch.rand(3, 1, 8, 8)).shape == (3,)
    assert run.state_dict()["1.weight"].shape == (5, 64)
    assert main(["train", str(config), "--set", "model.widht=4"]) == 2
    assert "did you mean 'width'" in capsys.readouterr().err
