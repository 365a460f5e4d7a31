"""Calibration from end to end: Trainer, resuming, report, card, configuration and estimator."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.cli.main import main as command_line
from ownerwise.step import PrivateStep
from ownerwise.training.averaging import Averaging

CLASSES = 3


def data(records=900, seed=0):
    """Return points in the plane; class c lies around its own corner, and owner c owns it."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(CLASSES), records // CLASSES)
    corners = np.array([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])
    x = corners[y] + rng.normal(0, 0.8, (len(y), 2))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def make_plan(calibration=True, pull=False, **options):
    _, y = data()
    owners = ow.Owners(y.numpy(), {0: 1.0, 1: 4.0, 2: 8.0}, 1e-5)
    given = {"calibration": ow.Calibration(pull=pull)} if calibration else {}
    return ow.plan(owners, steps=30, batch_size=60, **given, **options)


def fit(plan, folder=None, seed=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, CLASSES)
    trainer = ow.Trainer(
        model, plan, lr=2.0, folder=folder, seed=seed, progress=False, evaluate_every=10,
        name="run", **options,
    )  # fmt: skip
    return trainer, model


def test_the_trainer_calibrates_by_itself_and_helps_the_strict_owner(tmp_path):
    """Over eight runs with fixed seeds; recalls of the strictest owner's class on new points."""
    plan = make_plan()
    x, y = data(seed=9)
    gained = []
    for seed in range(8):
        trainer, _ = fit(plan, seed=seed)
        run = trainer.fit(data(), validation=(x, y), test=(x, y))
        line = run.history[-1]
        before, after = line["calibration"]["before"], line["validation"]
        gained.append(after["groups"]["0"]["recall"] - before["groups"]["0"]["recall"])
        assert line["test"]["accuracy"] == after["accuracy"]
        assert len(line["calibration"]["sums"]) == plan.closing_count
        assert [other["step"] for other in run.history] == [0, 10, 20, 30]
        assert all("calibration" not in other for other in run.history[:-1])
    assert np.mean(gained) > 0.05


@pytest.mark.parametrize("pull", [False, True])
def test_report_and_card_say_what_was_released(tmp_path, pull):
    plan = make_plan(pull=pull)
    trainer, _ = fit(plan, folder=tmp_path / "run")
    run = trainer.fit(data(), validation=data(seed=9))
    assert run.label == "IDP-SGD calibrated"
    loaded = ow.Run.load(tmp_path / "run")
    assert loaded.steps_spent == 30
    assert (loaded.epsilon() == plan.epsilon()).all()
    loaded.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Calibration after training" in page
    assert "3 sums over all records" in page
    loaded.card(tmp_path / "CARD.md")
    card = (tmp_path / "CARD.md").read_text()
    assert "3 sums, noise std 20.4" in card  # relative to a record that counts in full
    assert ("direction of the tilt" in page) == pull
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    printed: list[float] = []
    exec(code.group(1), {"print": printed.append})
    said = float(re.findall(r"this card says ([\d.]+)", card)[0])
    assert 0.99 * said <= printed[0] <= said


@pytest.mark.parametrize(("averaging", "pull"), [(None, False), (0.9, False), (None, True)])
def test_an_interrupted_run_resumes_and_calibrates_once(tmp_path, averaging, pull, monkeypatch):
    """Stopped by an error between two sums: the sum that was paid for is lost, nothing else."""
    plan = make_plan(pull=pull)
    trainer, _ = fit(plan, folder=tmp_path / "run", averaging=averaging)
    original = PrivateStep._calibrate
    calls = []

    def failing(step, rows, collate, after_sum):
        def after():
            after_sum()
            calls.append(step.calibration.released)
            raise KeyboardInterrupt

        original(step, rows, collate, after)

    monkeypatch.setattr(PrivateStep, "_calibrate", failing)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data())
    monkeypatch.undo()
    assert calls == [1]
    again, model = fit(plan, folder=tmp_path / "run", averaging=averaging)
    run = again.fit(data(), resume=True)
    sums = run.history[-1]["calibration"]["sums"]
    assert len(sums) == plan.closing_count
    assert None not in sums
    third, same = fit(plan, folder=tmp_path / "run", averaging=averaging)
    third.fit(data(), resume=True)  # finished: nothing is released again
    assert torch.equal(same.weight, model.weight)
    assert torch.equal(same.bias, model.bias)


def test_averaging_is_finished_once_and_before_the_release(monkeypatch):
    """Otherwise, the last line would put the uncalibrated average back into the model."""
    order = []
    finish, calibrate = Averaging.finish, PrivateStep.calibrate

    def noting(name, original):
        def call(self, *arguments, **options):
            order.append(name)
            return original(self, *arguments, **options)

        return call

    monkeypatch.setattr(Averaging, "finish", noting("average", finish))
    monkeypatch.setattr(PrivateStep, "calibrate", noting("calibrate", calibrate))
    trainer, model = fit(make_plan(), averaging=0.9)
    run = trainer.fit(data(), validation=data(seed=9))
    assert order == ["average", "calibrate"]
    x, y = data(seed=9)
    accuracy = (model(x).argmax(dim=1) == y).double().mean()
    assert run.history[-1]["validation"]["accuracy"] == pytest.approx(float(accuracy))


def test_the_estimator_calibrates():
    x, y = data()
    classifier = ow.PrivateClassifier(
        {0: 1.0, 1: 4.0, 2: 8.0}, classes=[0, 1, 2], steps=20, weights=None, calibration=True
    )
    classifier.fit(x.numpy(), y.numpy(), owners=y.numpy())
    assert classifier.plan_.closing_count == 3
    assert classifier.run_.history[-1]["calibration"]["shift"] is not None
    wrong = ow.PrivateClassifier(classes=[0, 1, 2], calibration={"shares": 0.1})
    with pytest.raises(ow.OwnerwiseError, match="did you mean 'share'"):
        wrong.fit(x.numpy(), y.numpy())


def test_every_front_end_can_pay_for_the_pull(tmp_path):
    """In Python, by the estimator and on the command line."""
    x, y = data()
    classifier = ow.PrivateClassifier(
        {0: 1.0, 1: 4.0, 2: 8.0}, classes=[0, 1, 2], steps=20, weights=None,
        calibration={"pull": True}, random_state=0,
    )  # fmt: skip
    with pytest.warns(ow.PrivacyWarning, match="NOT private"):
        classifier.fit(x.numpy(), y.numpy(), owners=y.numpy())
    assert classifier.plan_.closing_pulls is not None
    assert max(classifier.run_.history[-1]["calibration"]["pull"]) > 0.5
    budgets = tmp_path / "budgets.csv"
    budgets.write_text("owner,epsilon,records\na,1,400\nb,4,400\n")
    out = tmp_path / "plan.json"
    options = ["--steps", "20", "--batch-size", "40", "--out", str(out)]
    assert command_line(["plan", str(budgets), "--calibrate-pull", *options]) == 0
    plan = ow.Plan.load(out)
    assert plan.closing_pulls is not None
    assert (plan.epsilon() <= plan.targets).all()
