"""Predictions of a run: in memory and from its folder, with every form of inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run in a folder, and its model."""
    folder = tmp_path_factory.mktemp("run")
    trainer = tools.make_trainer(folder=folder, progress=False)
    return trainer.fit(tools.data()), trainer.model


def test_classes_and_probabilities_are_those_of_a_loop_over_records(trained):
    run, model = trained
    inputs = torch.randn(1200, 4, generator=torch.Generator().manual_seed(3))
    model.eval()
    with torch.no_grad():
        slow = torch.cat([model(row[None]) for row in inputs]).double()
    model.train()
    assert np.array_equal(run.predict(inputs), slow.argmax(dim=1).numpy())
    np.testing.assert_allclose(run.predict_proba(inputs), slow.softmax(dim=1), atol=1e-6)
    assert model.training  # dropout is off for predictions, and the mode is restored


def test_a_repair_is_subtracted(trained):
    run, model = trained
    inputs = torch.randn(50, 4)
    repair = ow.PullAdjustment(tau=3.0, counts=[[40, 5, 5], [3, 30, 8], [4, 5, 60]])
    model.eval()
    with torch.no_grad():
        outputs = model(inputs).double() - repair.shift(run.plan)
    model.train()
    assert np.array_equal(run.predict(inputs, repair=repair), outputs.argmax(dim=1).numpy())
    found = run.predict_proba(inputs, repair=repair)
    np.testing.assert_allclose(found, outputs.softmax(dim=1), atol=1e-6)


def test_a_loaded_run_predicts_the_same(trained):
    run, _ = trained
    loaded = ow.Run.load(run.folder, model=tools.make_model(seed=7))
    for inputs in (tools.data()[0], tools.data()[0].numpy(), tools.data()[0].double().numpy()):
        assert np.array_equal(loaded.predict(inputs), run.predict(tools.data()[0]))
    assert loaded.predict_proba(inputs[:0]).shape == (0, 3)


def test_a_loaded_run_without_its_model_says_what_to_do(trained):
    run, _ = trained
    with pytest.raises(ow.OwnerwiseError, match=r"Run\.load\(folder, model=network\)"):
        ow.Run.load(run.folder).predict(tools.data()[0])
    with pytest.raises(ow.OwnerwiseError, match="contains a different model"):
        ow.Run.load(run.folder, model=nn.Linear(4, 3))
    with pytest.raises(ow.OwnerwiseError, match="not made from a configuration"):
        run.predict("new.csv")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([[1.0, 2.0, 3.0, float("nan")]], "NaN"),
        (3.0, "expected the model's inputs"),
        ({"a": 1}, "expected the model's inputs"),
        (np.zeros((5, 3)), "the model fails on the first records: inputs are float32 \\[records, "),
    ],
)
def test_inputs_that_do_not_fit_are_refused(trained, inputs, message):
    with pytest.raises(ow.OwnerwiseError, match=message):
        trained[0].predict(inputs)


def test_what_does_not_fit_the_repair_is_refused(trained):
    run, _ = trained
    inputs = tools.data()[0]
    with pytest.raises(ow.OwnerwiseError, match="repair='pull'"):
        run.predict(inputs, repair="pull")
    two = ow.PullAdjustment(counts=[[20, 20], [30, 5], [5, 60]])
    with pytest.raises(ow.OwnerwiseError, match="each of the 2 classes of the repair"):
        run.predict(inputs, repair=two)
    weighted = tools.make_trainer(weights=ow.INO(), progress=False).fit(tools.data())
    with pytest.raises(ow.OwnerwiseError, match="PullAdjustment with INO"):
        weighted.predict(inputs, repair=ow.PullAdjustment(counts=[[20, 20, 20]] * 3))


def test_a_single_logit_and_a_function_of_ones_own():
    inputs, targets = tools.data()
    single = tools.make_trainer(
        model=nn.Linear(4, 1), loss=nn.functional.binary_cross_entropy_with_logits, progress=False
    ).fit((inputs, (targets > 0).float()[:, None]))
    chances = single.predict_proba(inputs)
    assert chances.shape == (120, 2)
    assert np.array_equal(single.predict(inputs), (chances[:, 1] > 0.5).astype(int))
    repair = ow.PullAdjustment(tau=2.0, counts=[[40, 5], [30, 30], [5, 60]])
    shift = repair.shift(single.plan)
    assert single.model is not None
    with torch.no_grad():
        logits = single.model(inputs).double().flatten() - (shift[1] - shift[0])
    found = single.predict_proba(inputs, repair=repair)[:, 1]
    np.testing.assert_allclose(found, torch.sigmoid(logits), atol=1e-6)
    odd = tools.make_trainer(predict=lambda outputs: outputs.argmin(dim=1), progress=False)
    run = odd.fit(tools.data())
    assert np.array_equal(run.predict(inputs), run.predict_proba(inputs).argmin(axis=1))


@pytest.mark.parametrize("bias", [True, False])
def test_a_calibration_that_is_not_in_a_bias_is_kept(tmp_path, bias):
    """Without a bias, a forward hook subtracts the shift: in memory and from the folder."""
    plan = tools.make_plan(calibration=ow.Calibration())
    model = nn.Linear(4, 3, bias=bias)
    run = tools.make_trainer(model=model, plan=plan, folder=tmp_path, progress=False).fit(
        tools.data()
    )
    shift = torch.tensor(run.history[-1]["calibration"]["shift"])
    inputs = tools.data()[0]
    state = run.state_dict()
    outputs = (inputs @ state["weight"].T + state.get("bias", 0)).double()
    expected = outputs if bias else outputs - shift
    np.testing.assert_allclose(run.predict_proba(inputs), expected.softmax(dim=1), atol=1e-5)
    again = ow.Run.load(tmp_path, model=nn.Linear(4, 3, bias=bias))
    assert np.array_equal(again.predict_proba(inputs), run.predict_proba(inputs))
    twice = ow.Run.load(tmp_path, model=again.model)  # the hook is replaced, not added
    assert np.array_equal(twice.predict_proba(inputs), run.predict_proba(inputs))
