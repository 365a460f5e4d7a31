"""The pull adjustment from end to end: Trainer, resuming, report, card, estimator."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from tools import training_tools as tools
from tools.training_tools import SEED

pytestmark = pytest.mark.filterwarnings("ignore:PullAdjustment.*clip norms")

CLASSES = 3
COUNTS = [[210, 5, 0], [0, 190, 3], [6, 0, 220]]


def data(records=600, seed=0):
    """Return points in the plane; class c lies around its own corner, and owner c owns it."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(CLASSES), records // CLASSES)
    corners = np.array([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]])
    x = corners[y] + rng.normal(0, 0.8, (len(y), 2))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def make_plan(**options):
    owners = ow.Owners(data()[1].numpy(), {0: 1.0, 1: 4.0, 2: 8.0}, 1e-5)
    return ow.plan(owners, **{"steps": 40, "batch_size": 60, **options})


def make_trainer(plan, repair=None, model=None, **options):
    torch.manual_seed(0)
    options = {"lr": 2.0, "seed": SEED, "progress": False, "evaluate_every": 20, **options}
    return ow.Trainer(model or nn.Linear(2, CLASSES), plan, repair=repair, name="run", **options)


def recalls(predicted, y):
    return [float((predicted[y == c] == c).mean()) for c in range(CLASSES)]


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_a_shift_in_the_loss_equals_one_at_prediction_for_a_linear_model(method):
    """A bias that starts lower by the shift gets the same gradients, batches and noise: exactly."""
    x, y = data()
    plan, repair = make_plan(method=method), ow.PullAdjustment(tau=1.3, counts=COUNTS)
    shift = repair.shift(plan)
    models = [nn.Linear(2, CLASSES).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[1].bias -= shift
    plain, adjusted = (
        make_trainer(plan, each, model).fit((x.double(), y))
        for each, model in zip((None, repair), models, strict=True)
    )
    late = plain.predict_proba(x, repair=repair)
    np.testing.assert_allclose(adjusted.predict_proba(x), late, rtol=0, atol=1e-9)
    assert np.abs(plain.predict_proba(x) - late).max() > 0.15
    np.testing.assert_array_equal(adjusted.predict(x, repair=repair), adjusted.predict(x))


def test_the_strict_owner_gains_over_seeds():
    plan, (x, y) = make_plan(), data(seed=9)
    repair = ow.PullAdjustment(tau=1.0, counts=COUNTS)
    gained = []
    for seed in range(6):
        runs = [make_trainer(plan, each, seed=seed).fit(data()) for each in (None, repair)]
        before, after = (recalls(run.predict(x), y.numpy()) for run in runs)
        gained.append(after[0] - before[0])
    assert np.mean(gained) > 0.1


def test_evaluations_are_those_of_the_repaired_predictions():
    x, y = data(seed=9)
    run = make_trainer(make_plan(), ow.PullAdjustment(counts=COUNTS)).fit(data(), validation=(x, y))
    accuracy = float((run.predict(x) == y.numpy()).mean())
    assert run.history[-1]["validation"]["accuracy"] == pytest.approx(accuracy)


def test_what_was_trained_in_is_not_subtracted_again():
    x = data(seed=9)[0]
    plan = make_plan()
    repair = ow.PullAdjustment(counts=COUNTS)
    run = make_trainer(plan, repair).fit(data())
    assert np.array_equal(run.predict_proba(x, repair=repair), run.predict_proba(x))
    stronger = ow.PullAdjustment(tau=1.5, counts=COUNTS)
    assert run.model is not None
    left = run.model(x).detach().double() - 0.5 * repair.shift(plan)
    expected = left.softmax(dim=1).numpy()
    np.testing.assert_allclose(run.predict_proba(x, repair=stronger), expected, atol=1e-6)


def test_resuming_needs_the_same_repair(tmp_path):
    plan = make_plan()
    make_trainer(plan, ow.PullAdjustment(counts=COUNTS), folder=tmp_path).fit(data())
    changed = np.array(COUNTS) + 1
    for other, words in (
        (None, "repair.tau was 1.0 and is now absent"),
        (ow.PullAdjustment(tau=0.5, counts=COUNTS), "repair.tau was 1.0 and is now 0.5"),
        (ow.PullAdjustment(counts=COUNTS, aim="balanced"), "repair.aim was 'natural'"),
        (ow.PullAdjustment(counts=changed), "repair.counts was"),
    ):
        with pytest.raises(ow.OwnerwiseError, match=words):
            make_trainer(plan, other, folder=tmp_path).fit(data(), resume=True)
    again = make_trainer(plan, ow.PullAdjustment(counts=COUNTS), folder=tmp_path)
    assert again.fit(data(), resume=True).steps_spent == plan.steps


def test_a_stopped_run_ends_like_the_whole_one(tmp_path):
    plan, repair = make_plan(), ow.PullAdjustment(counts=COUNTS)

    class Stop(tools.NoLogger):
        def log(self, line):
            if line["step"] == 20:
                raise KeyboardInterrupt

    model = nn.Linear(2, CLASSES)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(plan, repair, folder=tmp_path / "run", loggers=[Stop()]).fit(data())
    make_trainer(plan, repair, folder=tmp_path / "run").fit(data(), resume=True)
    make_trainer(plan, repair, folder=tmp_path / "whole").fit(data())
    assert tools.same(tools.stored(tmp_path / "run"), tools.stored(tmp_path / "whole"))
    run = ow.Run.load(tmp_path / "run", model=model)
    assert run.predict(data()[0]).shape == (600,)


def test_counted_labels_are_warned_of():
    """Pitfall 61."""
    counted = np.diag([200, 200, 200])
    plan = make_plan()
    with pytest.warns(ow.PrivacyWarning, match="equal those of the training records"):
        make_trainer(plan, ow.PullAdjustment(counts=counted)).fit(data())


def test_all_problems_are_listed_before_training():
    repair = ow.PullAdjustment(counts=[[20, 20], [30, 30], [40, 40]])
    with pytest.raises(ow.OwnerwiseError, match="each of the 2 classes of the repair"):
        make_trainer(make_plan(), repair).fit(data())
    bad = make_trainer(make_plan(), ow.PullAdjustment(counts=COUNTS[:2]), weights=ow.INO(), lr=-1)
    with pytest.raises(ow.OwnerwiseError) as error:
        bad.fit(data())
    assert [problem.split()[0] for problem in error.value.problems[:1]] == ["lr"]
    assert sum("PullAdjustment" in problem for problem in error.value.problems) == 2
    with pytest.raises(ow.OwnerwiseError, match="repair='pull'"):
        make_trainer(make_plan(), "pull").fit(data())


def test_rate_constraints_are_refused():
    part = ow.Partition({"sex": ("F", "M")}, classes=CLASSES)
    fair = ow.RateConstraints(ow.constraints.demographic_parity(part, "sex", max_gap=0.1))
    plan = make_plan(constraints=fair)
    x, y = data()
    targets = torch.stack([y, torch.arange(len(y)) % 2], dim=1)
    trainer = make_trainer(plan, ow.PullAdjustment(counts=COUNTS), constraints=fair)
    with pytest.raises(ow.OwnerwiseError, match="PullAdjustment with RateConstraints"):
        trainer.fit((x, targets))


def test_calibration_measures_what_is_left():
    """The natural aim works with a calibration; a second shift at prediction is refused."""
    plan, repair = make_plan(calibration=ow.Calibration()), ow.PullAdjustment(counts=COUNTS)
    run = make_trainer(plan, repair).fit(data())
    x = data(seed=9)[0]
    assert np.array_equal(run.predict(x, repair=repair), run.predict(x))
    calibrated = make_trainer(plan).fit(data())
    with pytest.raises(ow.OwnerwiseError, match="correct it twice"):
        calibrated.predict(x, repair=repair)
    with pytest.raises(ow.OwnerwiseError, match="natural class shares"):
        make_trainer(plan, ow.PullAdjustment(counts=COUNTS, aim="balanced")).fit(data())


def test_report_and_card_state_that_label_counts_were_published(tmp_path):
    run = make_trainer(
        make_plan(), ow.PullAdjustment(counts=COUNTS, aim="balanced"), folder=tmp_path / "run"
    ).fit(data())
    assert run.label == "IDP-SGD adjusted"
    loaded = ow.Run.load(tmp_path / "run")
    loaded.report(tmp_path / "report.html")
    loaded.card(tmp_path / "CARD.md")
    page, card = ((tmp_path / name).read_text() for name in ("report.html", "CARD.md"))
    for text in (page, card):
        assert "label counts published" in text
    assert "tau 1, equal class shares; label counts published per owner" in card
    assert "Shift of each class in the loss" in page


@pytest.mark.filterwarnings("ignore:random_state")
def test_the_estimator_trains_with_a_repair():
    x, y = (tensor.numpy() for tensor in data())
    options = {"classes": [0, 1, 2], "steps": 30, "hidden": (), "random_state": 0}
    budgets = {0: 1.0, 1: 4.0, 2: 8.0}
    given = {"tau": 1.0, "counts": COUNTS}
    fitted = [
        ow.PrivateClassifier(budgets, weights=None, repair=repair, **options).fit(x, y, owners=y)
        for repair in (ow.PullAdjustment(**given), given, None)
    ]
    chances = [classifier.predict_proba(x) for classifier in fitted]
    assert np.array_equal(chances[0], chances[1])
    assert np.abs(chances[0] - chances[2]).max() > 0.1
    assert pickle.loads(pickle.dumps(fitted[0])).predict(x).shape == (600,)
    weighted = ow.PrivateClassifier(budgets, repair=given, **options)
    with pytest.raises(ow.OwnerwiseError, match="PullAdjustment with INO"):
        weighted.fit(x, y, owners=y)
    wrong = ow.PrivateClassifier(budgets, repair={"tau": -1, "counts": COUNTS}, **options)
    with pytest.raises(ow.OwnerwiseError, match="tau -1"):
        wrong.fit(x, y, owners=y)
