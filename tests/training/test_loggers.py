"""Loggers: TensorBoard by its own reader, Weights & Biases and MLflow by stand-ins."""

import json
import math
import re
import sys
import types

import pytest
import torch
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


class FakeMlflow(types.ModuleType):
    """What is used of the package; names are checked as MLflow does."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls = []

    def start_run(self, run_name, **options):
        self.calls.append(("start", run_name, options))

    def log_params(self, params):
        assert all(re.fullmatch(r"[\w\-./ ]+", name, re.ASCII) for name in params)
        assert all(len(value) <= 500 for value in params.values())
        self.calls.append(("params", params))

    def log_metrics(self, metrics, step):
        assert all(re.fullmatch(r"[\w\-./ ]+", name, re.ASCII) for name in metrics)
        self.calls.append(("metrics", step, metrics))

    def set_tags(self, tags):
        self.calls.append(("tags", tags))

    def end_run(self):
        self.calls.append(("end",))


def test_mlflow_gets_settings_lines_and_whether_the_run_is_private(monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run = tools.make_trainer(loggers=["mlflow"], name="first", seed=None).fit(
        tools.data(), **tools.validation()
    )
    kinds = [call[0] for call in fake.calls]
    assert kinds == ["start", "params", *["metrics"] * 4, "tags", "end"]
    assert fake.calls[0][1] == "first"
    assert [call[1] for call in fake.calls[2:-2]] == [0, 4, 8, 12]
    assert fake.calls[1][1]["optimizer/lr"] == str(run.config["optimizer"]["lr"])
    expected = dict(loggers.numbers(run.history[-1]))
    assert list(fake.calls[-3][2].values()) == list(expected.values())
    assert fake.calls[-2][1] == {"private": "yes"}
    fake.calls.clear()
    tools.make_trainer(loggers=["mlflow"], seed=3).fit(tools.data(), **tools.validation())
    assert fake.calls[-2][1] == {"private": "NOT PRIVATE: fixed seed 3"}


@pytest.mark.filterwarnings("ignore:this process has already trained:ownerwise.PrivacyWarning")
@pytest.mark.parametrize("logger", ["mlflow", "wandb"])
def test_loggers_get_no_ids_and_nothing_from_training_records(monkeypatch, logger):
    """People's ids are budgets' keys and evaluated owners; the training labels are unusual."""
    fake = {"mlflow": FakeMlflow, "wandb": FakeWandb}[logger]()
    monkeypatch.setitem(sys.modules, logger, fake)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(120, 4, generator=generator), torch.arange(120) % 3
    people = [f"patient-{number:03d}" for number in range(120)]
    plan = ow.plan(ow.Owners(people, dict.fromkeys(people, 3.0), 1e-5), steps=4, batch_size=30)
    trainer = ow.Trainer(torch.nn.Linear(4, 3), plan, lr=0.1, loggers=[logger], progress=False)
    held_out = (torch.randn(40, 4, generator=generator), torch.arange(40) % 3)
    run = trainer.fit(
        (inputs, labels), validation=held_out, validation_owners=[f"new-{n}" for n in range(40)]
    )
    sent = repr(fake.calls)
    assert "patient-" not in sent
    assert "new-" not in sent
    numbers = {value for call in fake.calls for value in _numbers_of(call)}
    allowed = {value for line in run.history for _, value in loggers.numbers(line)}
    stated = set(map(float, re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", json.dumps(run.config))))
    assert numbers <= allowed | stated


def _numbers_of(content):
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, tuple | list):
        for each in content:
            yield from _numbers_of(each)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield content


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
