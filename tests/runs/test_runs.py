"""Runs, read from their folder."""

import getpass
import json
import platform
import socket

import pytest

import ownerwise as ow
from ownerwise.errors import Problems
from ownerwise.runs import (
    Run,
    reading,
)
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


def test_a_run_under_way_has_spent_what_its_account_says(tmp_path):
    seen = []

    class Reader(tools.NoLogger):
        def log(self, line):
            run = Run.load(tmp_path)
            assert run.epsilon().tolist() == run.plan.epsilon(steps=run.steps_spent).tolist()
            seen.append((line["step"], run.steps_spent))

    tools.make_trainer(folder=tmp_path, loggers=[Reader()]).fit(tools.data())
    assert seen == [(step, step) for step in (0, 4, 8, 12)]


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
        ("config.json", "{", "corrupted: expected JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("plan.json", None, "no plan"),
        ("account.db", None, "account .* is missing"),
        ("account.db", "SQLite format 3", "account .* is corrupted"),
    ],
)
def test_damage_is_explained(folder, name, content, message):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ow.OwnerwiseError, match=message):
        Run.load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("history.jsonl", "{}\nhalf\n{}\n"),
        ("history.jsonl", '{"step": "x"}\n'),
        ("environment.json", "{"),
        ("environment.json", None),
    ],
)
def test_damage_that_no_figure_depends_on_is_reported(folder, name, content):
    whole = Run.load(folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.warns(match=name):
        run = Run.load(folder)
    assert [name in problem for problem in run.problems] == [True]
    assert run.epsilon().tolist() == whole.epsilon().tolist()
    with pytest.warns(match=name):
        again = tools.make_trainer(folder=folder).fit(
            tools.data(), **tools.validation(), resume=True
        )
    assert again.steps_spent == whole.steps_spent
    assert Run.load(folder).problems == []


def test_a_run_before_its_first_line_can_be_read(tmp_path):
    class Failing(tools.NoLogger):
        def start(self, run):
            raise OSError

    trainer = tools.make_trainer(folder=tmp_path, loggers=[Failing()])
    with pytest.raises(OSError):
        trainer.fit(tools.data())
    run = Run.load(tmp_path)
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


def test_half_a_line_is_no_line(folder):
    path = folder / "history.jsonl"
    whole = Run.load(folder).history
    for cut in (1, 30):  # without its end a line may be cut
        path.write_bytes(path.read_bytes()[:-cut])
        assert reading.read_history(path, Run.load(folder).identity, Problems()) == whole[:-1]


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
