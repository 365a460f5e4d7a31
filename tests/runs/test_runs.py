"""Runs, read from their folder."""

import getpass
import json
import platform
import socket

import pytest

import ownerwise as ow
from ownerwise.runs import (
    Run,
)
from ownerwise.runs import run as runs
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


@pytest.fixture
def folder(tmp_path):
    tools.make_trainer(folder=tmp_path / "first").fit(tools.data(), **tools.validation())
    return tmp_path / "first"


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = tools.make_trainer(folder=tmp_path / "first", weights=ow.INO()).fit(
        tools.data(), **tools.validation()
    )
    loaded = Run.load(tmp_path / "first")
    for name in (
        "name", "label", "config", "plan", "history", "environment", "steps_spent", "updates",
        "seed", "private", "group_budgets", "folder",
    ):  # fmt: skip
        assert getattr(loaded, name) == getattr(run, name), name
    assert (loaded.name, loaded.label, loaded.private) == ("first", "INO-SGD", False)
    assert loaded.epsilon().tolist() == run.epsilon().tolist()
    assert (loaded.epsilon() <= loaded.plan.targets).all()


def test_a_run_under_way_has_spent_what_its_ledger_says(folder):
    (folder / "steps.json").write_text(
        json.dumps({"format": 1, "plan": tools.make_plan().hash, "steps_spent": 5})
    )
    run = Run.load(folder)
    assert run.steps_spent == 5
    assert run.epsilon().tolist() == run.plan.epsilon(steps=5).tolist()


def test_statistics_without_noise_make_a_run_not_private():
    config = {"name": "a", "label": "b", "seed": None, "group_budgets": {}}
    assert Run(config, tools.make_plan()).private
    scaled = Run(config | {"not_private": ["means of features"]}, tools.make_plan())
    assert not scaled.private
    assert scaled.not_private == ["means of features"]


def test_the_environment_names_versions_and_nobody(folder):
    found = json.loads((folder / "environment.json").read_text())
    assert set(found) == {
        "python", "ownerwise", "torch", "numpy", "dp-accounting", "platform", "threads",
    }  # fmt: skip
    assert found["python"] == platform.python_version()
    text = "".join(path.read_text() for path in folder.glob("*.json*"))
    for secret in (socket.gethostname(), str(folder), f'"{getpass.getuser()}"'):
        assert secret not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "damaged: expected JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("plan.json", None, "no plan"),
        ("history.jsonl", "{}\nhalf\n{}\n", "history.jsonl is damaged"),
    ],
)
def test_damage_is_explained(folder, name, content, message):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ow.OwnerwiseError, match=message):
        Run.load(folder)


def test_a_run_before_its_first_line_can_be_read(folder):
    for name in ("history.jsonl", "steps.json", "checkpoint-00000012.safetensors"):
        (folder / name).unlink()
    run = Run.load(folder)
    assert (run.history, run.steps_spent, run.updates) == ([], 0, 0)


def test_report_and_card_of_runs_in_memory(tmp_path):
    one, other = (
        tools.make_trainer(seed=seed, name=name, weights=weights).fit(
            tools.data(), **tools.validation()
        )
        for name, seed, weights in (("plain", None, None), ("weighted", 3, ow.INO()))
    )
    one.report(tmp_path / "report.html", other)
    one.card(tmp_path / "CARD.md")
    other.card(tmp_path / "other.md")
    report = (tmp_path / "report.html").read_text()
    assert "IDP-SGD" in report
    assert "INO-SGD" in report
    assert "fixed seed" not in (tmp_path / "CARD.md").read_text().lower()
    assert "fixed seed" in (tmp_path / "other.md").read_text().lower()


def test_half_a_line_is_no_line(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 0}\n{"step": 4')
    assert runs.read_history(path) == [{"step": 0}]
    path.write_text('{"step": 0}\n{"step": 4}')
    assert runs.read_history(path) == [{"step": 0}], "without its end a line may be cut"


def test_the_model_of_a_run_is_found_in_its_folder(tmp_path):
    """Also the averaged one, which is the result of a run with averaging."""
    model = tools.make_model()
    trainer = tools.make_trainer(model=model, folder=tmp_path / "run", averaging=0.9)
    run = trainer.fit(tools.data())
    fresh = tools.make_model(seed=1)
    fresh.load_state_dict(Run.load(run.folder).state_dict())
    assert tools.same(tools.weights_of(fresh), tools.weights_of(model))
    with pytest.raises(ow.OwnerwiseError, match="a run in memory has no checkpoint"):
        tools.make_trainer().fit(tools.data()).state_dict()
