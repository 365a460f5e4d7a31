"""The calibration release: its sensitivity, what it recovers, and its public rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ownerwise as ow
from ownerwise.accounting import gaussian_mu
from ownerwise.repair import Calibration, subtract_from_outputs
from ownerwise.repair.calibration import class_logits

DELTA = 1e-5


def plan_of(rounds=2, epsilon=(1.0, 4.0), records=400, **options):
    owners = ow.Owners(np.repeat(np.arange(len(epsilon)), records), np.array(epsilon), DELTA)
    calibration = Calibration(rounds=rounds, **options)
    return ow.plan(owners, "sample", steps=20, batch_size=40, calibration=calibration)


PULLED = plan_of(rounds=1, pull=True)


def calibrate(plan, logits, labels, std=None, seed=0):
    """Return the calibration after exact sums plus noise, in a float64 loop over records."""
    bound = Calibration().bind(plan)
    if std is not None:
        bound._std = std
    rng = np.random.default_rng(seed)
    for _ in range(plan.closing_count):
        rows = bound.contributions(logits, labels)
        total = torch.stack(list(rows.double())).sum(dim=0)
        bound.observe(total + torch.tensor(rng.normal(0, bound._std, len(total))))
    return bound


def tilted(records=800, classes=4, seed=0, strength=1.5):
    """Return logits of a fair model with biases added, and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, records, p=np.arange(1, classes + 1) / sum(range(classes + 1)))
    logits = 2.0 * np.eye(classes)[labels] + rng.normal(0, 1, (records, classes))
    biases = np.linspace(-strength, strength, classes)
    return torch.tensor(logits + biases), torch.tensor(labels), biases


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 8), st.integers(1, 12), st.integers(0, 10**6), st.floats(0.01, 1e6),
    st.booleans(),
)  # fmt: skip
def test_one_record_moves_every_sum_by_at_most_one(classes, records, seed, scale, pull):
    """All sums together, whatever the noised sums so far: every record removed in turn."""
    rng = np.random.default_rng(seed)
    plan = PULLED if pull else plan_of()
    logits = torch.tensor(rng.normal(0, scale, (records, classes)))
    labels = torch.tensor(rng.integers(0, classes, records))
    bound = Calibration().bind(plan)
    moved = np.zeros(records)
    for _ in range(plan.closing_count):
        rows = bound.contributions(logits, labels).double()
        for out in range(records):
            rest = [at for at in range(records) if at != out]
            without = bound.contributions(logits[rest], labels[rest]).double().sum(dim=0)
            moved[out] += float(((rows.sum(dim=0) - without) ** 2).sum())
        bound.observe(rows.sum(dim=0) + torch.tensor(rng.normal(0, plan.closing_std, classes)))
    assert moved.max() <= plan.closing_count * (1 + 1e-9)


def test_without_noise_predictions_and_labels_agree():
    plan = plan_of(rounds=8)
    logits, labels, _ = tilted()
    bound = calibrate(plan, logits, labels, std=1e-9)
    assert bound.shift is not None
    predicted = torch.softmax(logits - bound.shift, dim=1).sum(dim=0)
    np.testing.assert_allclose(predicted, np.bincount(labels), rtol=2e-3)
    recalls = [
        [float((z[labels == c].argmax(1) == c).double().mean()) for c in range(4)]
        for z in (logits, logits - bound.shift)
    ]
    assert min(recalls[1]) > min(recalls[0]) + 0.2


def test_with_the_noise_of_the_plan_most_of_the_tilt_is_gone():
    """Over 40 draws of the noise, compared with what many rounds without noise would take out."""
    plan = plan_of(records=2000)
    logits, labels, _ = tilted(records=4000)
    exact = calibrate(plan_of(rounds=30), logits, labels, std=1e-9).shift
    assert exact is not None
    exact = exact - exact.mean()
    left = []
    for seed in range(40):
        shift = calibrate(plan, logits, labels, seed=seed).shift
        assert shift is not None
        left.append(float((exact - (shift - shift.mean())).abs().mean()))
    assert np.mean(left) < 0.4 * float(exact.abs().mean())


def test_where_nothing_is_tilted_noise_is_hardly_added():
    plan = plan_of(records=100)
    logits, labels, _ = tilted(records=200, classes=10, strength=0.0)
    fair = calibrate(plan_of(rounds=20), logits, labels, std=1e-9)
    assert fair.shift is not None
    logits = logits - fair.shift  # predictions and labels agree exactly
    shifts, unshrunk = [], []
    for seed in range(40):
        bound = calibrate(plan, logits, labels, seed=seed)
        assert bound.shift is not None
        shifts.append(float(bound.shift.norm()))
        unshrunk.append(float(np.linalg.norm(bound._shrunk()[1])))
    assert np.mean(shifts) < 0.3 * np.mean(unshrunk)


def test_the_strictest_owner_pays_a_tenth():
    plan = plan_of()
    mu = math.sqrt(plan.closing_count) / plan.closing_std
    assert mu**2 == pytest.approx(0.1 * gaussian_mu(1.0, DELTA) ** 2, rel=1e-3)
    assert plan.closing_shares is None
    assert plan.closing_count == 3


def test_a_few_very_strict_owners_do_not_ruin_it_for_all():
    """A public rule lets them contribute less; nobody spends more than their budget."""
    epsilon = np.array([0.02] * 3 + [2.0] * 997)
    owners = ow.Owners(np.arange(1000), epsilon, DELTA)
    plan = ow.plan(owners, "sample", steps=20, batch_size=40, calibration=Calibration())
    assert plan.closing_shares is not None
    assert (plan.closing_shares[3:] > 0.99).all()
    assert (plan.closing_shares[:3] < 0.05).all()
    assert (plan.epsilon() <= epsilon).all()
    strict = ow.Owners(np.arange(1000), np.linspace(0.5, 2.0, 1000), DELTA)
    equal = ow.plan(strict, "sample", steps=20, batch_size=40, calibration=Calibration())
    shares = np.ones(1000) if equal.closing_shares is None else equal.closing_shares
    assert equal.closing_std < 60 / gaussian_mu(0.5, DELTA)
    assert shares.min() > 0.2


def test_many_records_allow_more_rounds():
    few = Calibration().closing(np.array([1.0]), np.array([DELTA]), np.array([1000]))
    many = Calibration().closing(np.array([1.0]), np.array([DELTA]), np.array([10**6]))
    assert (few.count, many.count) == (3, 6)
    given = Calibration(rounds=4).closing(np.array([1.0]), np.array([DELTA]), np.array([10]))
    assert given.count == 5


def test_a_single_output_is_a_binary_logit():
    outputs = torch.tensor([[0.3], [-1.0]])
    expected = torch.tensor([[0.0, 0.3], [0.0, -1.0]]).double()
    assert torch.allclose(class_logits(outputs), expected)
    assert torch.allclose(class_logits(outputs[:, 0]), expected)


def test_labels_outside_the_classes_add_nothing():
    bound = Calibration().bind(plan_of())
    rows = bound.contributions(torch.zeros(3, 4), torch.tensor([-100, 2, 7]))
    assert rows.sum(dim=1).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [(torch.zeros(3, 4, 5), torch.zeros(3).long()), (torch.zeros(3, 4), torch.zeros(3))],
)
def test_what_is_no_classifier_is_refused(outputs, targets):
    with pytest.raises(ow.OwnerwiseError, match="only classifiers have class biases"):
        Calibration().bind(plan_of()).contributions(outputs, targets)


def test_all_bad_settings_are_named():
    with pytest.raises(ow.OwnerwiseError) as error:
        Calibration(share=1.5, rounds=0, classes=1)
    named = [problem.split()[1] for problem in error.value.problems]
    assert named == ["share", "rounds", "classes"]
    with pytest.raises(ow.OwnerwiseError, match="pull 1: expected True or False"):
        Calibration(pull=1)  # pyright: ignore[reportArgumentType]


def test_the_state_continues_between_rounds():
    plan = plan_of()
    logits, labels, _ = tilted()
    whole = calibrate(plan, logits, labels)
    half = Calibration().bind(plan)
    half.load_state({"sums": whole.state()["sums"][:2]})
    assert half.shift is None
    half.observe(torch.tensor(whole.state()["sums"][2], dtype=torch.float64))
    assert half.shift.tolist() == whole.shift.tolist()
    for bad in ([[1.0, math.nan]], [[1.0]] * 9, [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError):
            Calibration().bind(plan).load_state({"sums": bad})


def test_a_lost_round_is_skipped_and_lost_labels_leave_the_model_alone():
    plan = plan_of()
    logits, labels, _ = tilted()
    sums = calibrate(plan, logits, labels).state()["sums"]
    bound = Calibration().bind(plan)
    bound.load_state({"sums": [sums[0], None, sums[2]]})
    assert bound.shift is not None
    bound.load_state({"sums": [None, sums[1], sums[2]]})
    assert bound.shift is None
    assert bound.record()["shift"] is None


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("model", "width", "folds"),
    [
        (nn.Linear(3, 4), 4, True),
        (nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)), 4, True),
        (nn.Sequential(nn.Linear(3, 1)), 2, True),
        (Squeezed(), 2, True),
        (nn.Sequential(nn.Linear(3, 4, bias=False)), 4, False),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, False),
        (Reused(), 3, False),
    ],
)
def test_the_shift_is_folded_into_the_last_bias_where_there_is_one(model, width, folds):
    inputs, shift = torch.randn(6, 3), torch.linspace(-1, 2, width).double()
    before = model(inputs).detach()
    training = model.training
    assert subtract_from_outputs(model, shift, inputs) is folds
    after = model(inputs).detach()
    assert model.training == training
    amount = shift if after.dim() == 2 and after.shape[1] == width else shift[1] - shift[0]
    assert torch.allclose(before - after, amount.float().expand_as(before), atol=1e-5)  # float32


def pulled(plan, logits, labels, owner, std=None, seed=0, lost=()):
    """Return a calibration towards the pull after sums in a float64 loop, with the plan's noise."""
    bound = Calibration().bind(plan)
    noise = plan.closing_std if std is None else std
    if std is not None:
        bound._std = std
    rng = np.random.default_rng(seed)
    for number in range(plan.closing_count):
        lengths = torch.tensor(plan.closing_lengths(number)[owner])
        rows = bound.contributions(logits, labels).double() * lengths[:, None]
        total = rows.sum(dim=0) + torch.tensor(rng.normal(0, noise, rows.shape[1]))
        bound.observe(None if number in lost else total)
    return bound


def owned(plan, records=150, classes=6, strength=1.0, seed=0):
    """Return logits tilted by `strength` times the log pull of the owners of each class, labels
    and owners: owner 0 has the first half of the classes, owner 1 the others.
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), records // classes)
    owner = (labels >= classes // 2).astype(int)
    pull = np.log(plan.sampling_rates * plan.clip_norms)[(np.arange(classes) >= classes // 2) * 1]
    logits = 2.0 * np.eye(classes)[labels] + rng.normal(0, 1, (len(labels), classes))
    return torch.tensor(logits + strength * pull), torch.tensor(labels), owner


def test_the_measured_pull_is_the_tilt_that_the_plan_predicts():
    """Without noise: sampling rate times clip norm of the owner of each class, up to a constant."""
    for method in ("sample", "scale", "both"):
        owners = ow.Owners(np.repeat([0, 1], 400), np.array([1.0, 4.0]), DELTA)
        plan = ow.plan(owners, method, steps=20, batch_size=40, calibration=Calibration(pull=True))
        logits, labels, owner = owned(plan)
        bound = pulled(plan, logits, labels, owner, std=1e-9)
        expected = np.log(plan.sampling_rates * plan.clip_norms)
        expected = np.repeat(expected - expected.mean(), 3)
        found = np.array(bound.record()["pull"])
        np.testing.assert_allclose(found - found.mean(), expected, rtol=2e-2)


def test_with_few_records_the_pull_recovers_more_of_the_tilt():
    """600 records, 40 draws of the noise: the mean distance from the tilt falls by a third."""
    plain = plan_of(rounds=2)
    logits, labels, owner = owned(plain, records=600)
    tilt = np.log(plain.sampling_rates * plain.clip_norms)
    tilt = np.repeat(tilt - tilt.mean(), 3)
    away = {}
    for plan in (plain, PULLED):
        shifts = [pulled(plan, logits, labels, owner, seed=seed).shift for seed in range(40)]
        assert all(shift is not None for shift in shifts)
        centred = [(shift - shift.mean()).numpy() for shift in shifts]
        away[plan.hash] = np.mean([np.linalg.norm(shift - tilt) for shift in centred])
    assert away[PULLED.hash] < 0.67 * away[plain.hash]
    assert away[plain.hash] < np.linalg.norm(tilt)


def test_a_tilt_that_is_not_there_is_measured_away():
    """The plan predicts a ratio of 6, but many records show that there is none. A single round
    would overshoot."""
    for plan in (PULLED, plan_of(rounds=4, pull=True)):
        logits, labels, owner = owned(plan, records=60_000, strength=0.0)
        shift = pulled(plan, logits, labels, owner).shift
        assert shift is not None
        assert float(shift.max() - shift.min()) < 0.3


def test_the_first_sum_alone_decides_the_direction_and_its_bounds():
    """A class that noise makes look as if it belonged to nobody stays within the public bounds."""
    bound = Calibration().bind(PULLED)
    bound.observe(torch.tensor([-1e3, 1e9, 1e4]) * bound._unit)
    bound.observe(torch.tensor([1e4, 1e4, 1e4]) * bound._unit)
    most = np.ptp(np.log(PULLED.sampling_rates * PULLED.clip_norms))
    assert 0.9 * most < np.ptp(bound.record()["pull"]) < 1.01 * most


def test_a_direction_that_is_only_noise_is_mostly_dropped():
    """Both owners hold the same classes, 25 records each: over 40 draws, the shift is far smaller
    than the tilt that the plan would cause if the owners held different classes."""
    logits, labels, _ = owned(PULLED, records=300, strength=0.0)
    found = [pulled(PULLED, logits, labels, np.arange(300) % 2, seed=seed) for seed in range(40)]
    most = np.ptp(np.log(PULLED.sampling_rates * PULLED.clip_norms))
    assert np.median([np.ptp(bound.shift.tolist()) for bound in found]) < 0.5 * most
    assert np.median([np.ptp(bound.record()["pull"]) for bound in found]) < 0.6 * most


def test_a_lost_pull_leaves_an_ordinary_calibration_and_lost_labels_none():
    logits, labels, owner = owned(PULLED, records=6000)
    found = pulled(PULLED, logits, labels, owner, lost=(0,))
    assert found.shift is not None
    assert found.record()["pull"] == [0.0] * 6
    assert pulled(PULLED, logits, labels, owner, lost=(1,)).shift is None
    assert pulled(PULLED, logits, labels, owner, lost=(2,)).shift is None


def test_equal_budgets_have_no_pull_and_uniform_plans_predict_no_tilt():
    owners = ow.Owners(np.repeat([0, 1], 400), np.array([2.0, 2.0]), DELTA)
    equal = [
        ow.plan(owners, steps=20, batch_size=40, calibration=Calibration(pull=pull))
        for pull in (False, True)
    ]
    assert equal[0].closing_pulls is None
    assert equal[1].closing_pulls is None
    assert equal[1].hash == equal[0].hash
    owners = ow.Owners(np.repeat([0, 1], 400), np.array([1.0, 4.0]), DELTA)
    uniform = ow.plan(
        owners, "uniform", steps=20, batch_size=40, calibration=Calibration(pull=True)
    )
    logits, labels, owner = owned(uniform)
    assert pulled(uniform, logits, labels, owner).record()["pull"] == [0.0] * 6


def test_the_same_noised_sums_give_the_same_shift_whatever_the_data():
    """Neighbouring data sets: everything but the sums is public."""
    plan = PULLED
    states = []
    for seed in (1, 2):
        logits, labels, _ = owned(plan, seed=seed, records=60 * seed)
        bound = Calibration().bind(plan)
        for number in range(plan.closing_count):
            bound.contributions(logits, labels)
            total = torch.tensor([40.0, 30.0 + number, 20.0, 9.0, 60.0, 50.0]) * bound._unit
            bound.observe(total.double())
        states.append((bound.record(), bound.shift.tolist()))
    assert states[0] == states[1]


def test_the_number_of_sums_does_not_change_with_the_pull():
    epsilon, delta = np.array([1.0, 4.0]), np.full(2, DELTA)
    for records, count in ((1000, 3), (10**6, 6)):
        for pull in (False, True):
            release = Calibration(pull=pull).closing(epsilon, delta, np.full(2, records))
            assert release.count == count
    assert Calibration(pull=True).settings()["pull"] is True
    assert "pull" not in Calibration().settings()
