"""Loggers: TensorBoard by its own reader, Weights & Biases by a stand-in."""

import json
import math
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ownerwise as ow
from ownerwise.runs import (
    Run,
)
from ownerwise.training import loggers
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


def test_tensorboard_holds_every_figure_of_the_history(tmp_path):
    trainer = tools.make_trainer(folder=tmp_path, loggers=["tensorboard"])
    run = trainer.fit(tools.data(), **tools.validation())
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    expected = dict(loggers.numbers(run.history[-1]))
    assert set(events.Tags()["scalars"]) == set(expected)
    for name in ("validation/accuracy", "validation/groups/ann/recall", "learning_rate"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [0, 4, 8, 12]
        assert scalars[-1].value == pytest.approx(expected[name], rel=1e-6)


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path):
    class Fail:
        def start(self, run): ...
        def finish(self, run): ...

        def log(self, line):
            if line["step"] == 8:
                raise RuntimeError("the disk is full")

    options = {"folder": tmp_path, "checkpoint_every": 5}
    trainer = tools.make_trainer(loggers=["tensorboard", Fail()], **options)
    with pytest.raises(RuntimeError, match="disk is full"):
        trainer.fit(tools.data(), **tools.validation())
    tools.make_trainer(loggers=["tensorboard"], **options).fit(
        tools.data(), **tools.validation(), resume=True
    )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [s.step for s in events.Scalars("validation/accuracy")] == [0, 4, 8, 12]


class FakeWandb(types.ModuleType):
    """What is used of the package: init, and the run's log and finish."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


def test_weights_and_biases_gets_config_and_lines(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer = tools.make_trainer(loggers=["wandb"], name="first")
    run = trainer.fit(tools.data(), **tools.validation())
    opened = {"name": "first", "config": run.config, "project": "ownerwise"}
    assert fake.calls[0] == ("init", opened)
    assert [call[1] for call in fake.calls[1:-1]] == [0, 4, 8, 12]
    assert fake.calls[-2][2] == dict(loggers.numbers(run.history[-1]))
    assert fake.calls[-1] == ("finish",)


def test_weights_and_biases_of_a_resumed_run_begins_with_its_past(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    history = [{"step": 0, "validation": None}, {"step": 4, "validation": {"loss": 1.0}}]
    run = Run({"name": "late"}, tools.make_plan(), history)
    loggers.WeightsAndBiases("study", mode="offline").start(run)
    assert fake.calls[0][1]["mode"] == "offline"
    assert fake.calls[1:] == [
        ("log", 0, {"step": 0}),
        ("log", 4, {"step": 4, "validation/loss": 1.0}),
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_done(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    trainer = tools.make_trainer(folder=tmp_path / "run", loggers=[name])
    with pytest.raises(ow.OwnerwiseError, match=f"pip install '{name}'"):
        trainer.fit(tools.data())
    assert not (tmp_path / "run").exists()


def test_json_lines_are_valid_json_without_folder_or_user_names(tmp_path):
    run = tools.make_trainer(folder=tmp_path).fit(tools.data(), **tools.validation())

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "history.jsonl").read_text()
    lines = [json.loads(x, parse_constant=refuse) for x in text.splitlines()]
    assert lines == [{**line, "run_id": run.identity} for line in run.history]
    assert str(tmp_path) not in text


def test_numbers_skip_what_is_no_number():
    line = {"step": 3, "validation": {"loss": None, "worst_group": {"name": "a", "recall": 0.5}}}
    assert dict(loggers.numbers(line)) == {"step": 3, "validation/worst_group/recall": 0.5}
    assert math.isclose(dict(loggers.numbers({"a": {"b": 1}}))["a/b"], 1)
