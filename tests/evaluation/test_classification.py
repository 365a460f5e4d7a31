"""AUC, sensitivity, calibration and their intervals: against slow versions, and their coverage.

The tests of coverage have fixed seeds; what they require is far below 95% minus the error of the
simulation (0.7% for 1,000 draws), except where the docstring says that the method falls short.
"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch.nn import functional

import ownerwise as ow
from ownerwise.evaluation import Evaluation, classification
from ownerwise.evaluation.classification import _bins, auc, calibration
from ownerwise.evaluation.intervals import difference, share
from ownerwise.mechanisms.target_checks import class_probabilities


def two_columns(scores):
    return np.column_stack([1 - np.asarray(scores), scores])


def slow_auc(scores, inside):
    """The share of pairs in the right order; ties count half."""
    pairs = [(x > y) + 0.5 * (x == y) for x in scores[inside] for y in scores[~inside]]
    return float(np.mean(pairs))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.booleans())
def test_the_auc_is_the_share_of_pairs_in_the_right_order(seed, classes, tied):
    rng = np.random.default_rng(seed)
    actual = rng.permutation(np.repeat(range(classes), rng.integers(10, 25, classes)))
    scores = rng.random((len(actual), classes)) + 0.3 * np.eye(classes)[actual]
    scores = np.round(scores, 1) if tied else scores
    chosen = [1] if classes == 2 else range(classes)
    expected = np.mean([slow_auc(scores[:, k], actual == k) for k in chosen])
    found = auc(actual, scores)
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize(
    ("distance", "spread", "larger"), [(0.3, 2.5, "delong"), (1.5, 0.5, "hanley")]
)
def test_the_variance_of_the_auc_is_the_larger_of_two(distance, spread, larger):
    """DeLong's, S10 / m + S01 / n, and Hanley and McNeil's, both written out."""
    rng = np.random.default_rng(3)
    inside = np.repeat([True, False], [40, 200])
    scores = rng.normal(size=240) * np.where(inside, spread, 1) + distance * inside
    v10 = [np.mean((x > scores[~inside]) + 0.5 * (x == scores[~inside])) for x in scores[inside]]
    v01 = [np.mean((scores[inside] > y) + 0.5 * (scores[inside] == y)) for y in scores[~inside]]
    a = float(np.mean(v10))
    q = (1 - a) / (2 - a) + a / (1 + a)
    variances = {
        "delong": np.var(v10, ddof=1) / 40 + np.var(v01, ddof=1) / 200,
        "hanley": a * (1 - a) * (1 + 119 * q) / (40 * 200),
    }
    assert max(variances, key=variances.get) == larger
    found = auc(inside.astype(int), two_columns(special.expit(scores)))
    records = a * (1 - a) / variances[larger]
    for end in (found.low, found.high):  # Wilson's interval solves this equation
        assert (end - a) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / records, rel=1e-5)


def test_the_interval_of_a_share_is_wilsons():
    for hits, records in ((0, 12), (3, 20), (45, 50), (50, 50)):
        found = share(np.repeat([True, False], [hits, records - hits]))
        known = stats.binomtest(hits, records).proportion_ci(0.95, method="wilson")
        assert (found.low, found.high) == pytest.approx((known.low, known.high), abs=1e-9)


def coverage(draw, truth, draws=1000):
    found = [draw() for _ in range(draws)]
    return np.mean([one.low <= truth <= one.high for one in found])


def test_intervals_of_shares_cover_the_truth():
    rng = np.random.default_rng(1)
    for records, truth in ((20, 0.9), (60, 0.5), (300, 0.99)):
        assert coverage(lambda n=records, p=truth: share(rng.random(n) < p), truth) > 0.93


def test_intervals_cover_the_truth_although_records_of_an_owner_are_alike():
    """Intervals that take the records for independent cover it in about three of ten cases."""
    rng = np.random.default_rng(2)
    owners = np.repeat(np.arange(8), 140)

    def hits():
        return rng.random(len(owners)) < rng.beta(2.8, 1.2, 8)[owners]

    assert coverage(lambda: share(hits(), owners), 0.7, 600) > 0.92
    assert coverage(lambda: share(hits()), 0.7, 600) < 0.5
    alone = share(hits(), np.zeros(len(owners), dtype=int))
    assert (alone.low, alone.high) == (0, 1)  # a single owner says nothing about others


@pytest.mark.parametrize(
    ("inside", "outside", "distance"),
    [(12, 60, 1.5), (15, 500, 2.0), (30, 300, 2.5), (100, 255, 1.0)],
)
def test_intervals_of_the_auc_cover_the_truth(inside, outside, distance):
    rng = np.random.default_rng(4)
    actual = np.repeat([1, 0], [inside, outside])

    def draw():
        scores = rng.normal(size=len(actual)) + distance * actual
        return auc(actual, two_columns(special.expit(scores)))

    assert coverage(draw, stats.norm.cdf(distance / np.sqrt(2)), 600) > 0.93


@pytest.mark.parametrize(("records", "slope"), [(60, 1.0), (355, 2.0), (300, 4.0)])
def test_intervals_of_the_calibration_error_cover_the_truth(records, slope):
    """The truth is the mean distance over the bins, for predictions as they are; conservative."""
    rng = np.random.default_rng(5)
    hits = []
    for _ in range(150):
        logits = rng.normal(0, 1.5, records)
        true, stated = special.expit(logits), special.expit(slope * logits)
        points, error = calibration(stated, rng.random(records) < true)
        truth = np.abs(np.bincount(_bins(stated), weights=true - stated)).sum() / records
        hits.append(error.low <= truth <= error.high)
        assert sum(point["records"] for point in points) == records
    assert np.mean(hits) > 0.93


def test_intervals_of_the_calibration_error_allow_for_owners_whose_records_are_alike():
    rng = np.random.default_rng(6)
    owners, hits = np.repeat(np.arange(12), 30), {True: [], False: []}
    for _ in range(200):
        shift = rng.normal(0, 1.5, 12)[owners]
        logits = rng.normal(0, 1, len(owners))
        stated = special.expit(logits)
        observed = rng.random(len(owners)) < special.expit(1.6 * (logits + shift))
        for grouped in (True, False):
            error = calibration(stated, observed, owners if grouped else None)[1]
            hits[grouped].append(error.low)
    # The truth is the mean over shifts: the lower end must not claim more than it.
    many = rng.normal(0, 1.5, 4000)
    logits = rng.normal(0, 1, 4000)
    truth = np.abs(
        [np.mean(special.expit(1.6 * (x + many)) - special.expit(x)) for x in logits]
    ).mean()
    assert np.mean(np.array(hits[True]) > truth) < 0.05
    assert np.mean(hits[True]) < np.mean(hits[False])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 150), st.booleans())
def test_bins_hold_at_least_ten_records_and_equal_probabilities_share_one(seed, records, tied):
    rng = np.random.default_rng(seed)
    stated = rng.choice([0.1, 0.5, 0.9], records) if tied else rng.random(records)
    bins = _bins(stated)
    if records < 10:
        assert bins is None
        return
    assert np.bincount(bins).min() >= 10
    assert bins.max() < 10
    assert (np.diff(bins[np.argsort(stated, kind="stable")]) >= 0).all()
    assert all(len(set(bins[stated == value])) == 1 for value in set(stated))


def test_a_constant_answer_is_no_better_than_the_majority():
    rng = np.random.default_rng(7)
    actual = (rng.random(200) < 0.3).astype(int)
    always = classification(np.zeros(200, dtype=int), actual, None)
    assert always["majority"]["class"] == "0"
    assert always["majority"]["share"] == always["accuracy"]["value"]
    assert always["majority"]["gain"] == {"value": 0, "low": 0, "high": 0}
    assert set(always) == {"accuracy", "majority"}
    right = classification(actual, actual, two_columns(actual))
    assert right["majority"]["gain"]["low"] > 0.2
    assert (right["auc"]["value"], right["sensitivity"]["value"]) == (1, 1)
    assert right["auc"]["low"] < 0.95  # not certain, however perfect
    assert right["calibration_error"]["value"] == 0


def test_differences_are_paired():
    rng = np.random.default_rng(8)
    values = rng.choice([-1.0, 0.0, 1.0], 300, p=[0.1, 0.6, 0.3])
    found = difference(values, None)
    half = 1.959964 * values.std() / np.sqrt(300)
    expected = values.mean() - half, values.mean() + half
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-5)


def test_no_number_rests_on_a_handful_of_records_nor_reveals_one_that_would():
    rng = np.random.default_rng(9)
    actual = np.repeat([0, 1], [100, 9])
    found = classification(actual, actual, two_columns(rng.random(109)))
    assert not {"auc", "sensitivity", "specificity"} & set(found)  # each would reveal the others
    of_group = classification(actual, actual, two_columns(rng.random(109)), overall=False)
    assert set(of_group) == {"accuracy", "calibration_error"}
    three = np.repeat([0, 1, 2], [50, 50, 9])
    scores = rng.random((109, 3))
    expected = np.mean([slow_auc(scores[:, k], three == k) for k in (0, 1)])
    assert classification(three, three, scores)["auc"]["value"] == pytest.approx(expected)
    assert "recalls" not in classification(three, three, scores)  # the mean over classes is known


def test_with_three_classes_each_has_its_recall():
    rng = np.random.default_rng(10)
    actual = np.repeat([0, 1, 2], [50, 10, 40])
    predicted = np.where(rng.random(100) < 0.7, actual, rng.integers(0, 3, 100))
    owners = rng.integers(0, 30, 100)
    scores = rng.random((100, 3))
    found = classification(predicted, actual, scores, owners)["recalls"]
    assert set(found) == {"0", "1", "2"}
    for number in range(3):
        of_class = found[str(number)]
        assert of_class["value"] == (predicted[actual == number] == number).mean()
        alone = share(predicted[actual == number] == number, owners[actual == number])
        assert (of_class["low"], of_class["high"]) == (alone.low, alone.high)
    assert "recalls" not in classification(predicted, actual, scores, overall=False)
    assert "recalls" not in classification(predicted % 2, actual % 2, scores[:, :2])


def test_probabilities_are_those_of_the_loss():
    outputs = torch.tensor([[0.3, -1.0], [2.0, 0.5]])
    targets = torch.tensor([0, 1])
    softmax = class_probabilities(functional.cross_entropy, outputs, targets)
    np.testing.assert_allclose(softmax, outputs.double().softmax(1))
    logit, chance = torch.tensor([0.4, -2.0]), torch.tensor([0.4, 0.9])
    with_logits = functional.binary_cross_entropy_with_logits
    np.testing.assert_allclose(
        class_probabilities(with_logits, logit, targets)[:, 1], logit.double().sigmoid()
    )
    np.testing.assert_allclose(
        class_probabilities(torch.nn.BCELoss(), chance, targets)[:, 1], chance.double()
    )
    assert class_probabilities(functional.mse_loss, logit, targets) is None


@pytest.fixture
def evaluated():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 3, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    model = torch.nn.Linear(3, 2)
    people = np.repeat(np.arange(30), 4)
    wards = np.resize(["a", "b"], 120)
    evaluation = Evaluation((inputs, labels), wards, owners=people)
    return evaluation, model, inputs, labels, people, wards


def test_an_evaluation_has_details_on_request_overall_and_by_group(evaluated):
    evaluation, model, inputs, labels, people, wards = evaluated
    plain = evaluation(model, functional.cross_entropy)
    found = evaluation(model, functional.cross_entropy, details=True)
    scores = model(inputs).detach().double().softmax(1).numpy()
    predicted = scores.argmax(1)
    expected = classification(predicted, labels.numpy(), scores, people)
    assert found.pop("classification") == json.loads(json.dumps(expected))
    for name, group in found["groups"].items():
        of_group = wards == name
        assert group.pop("classification") == classification(
            predicted[of_group], labels.numpy()[of_group], scores[of_group], people[of_group],
            overall=False,
        )  # fmt: skip
    assert found == plain


def test_runs_have_details_in_their_last_line_only(tmp_path):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 3)).astype("float32")
    labels = (inputs[:, 0] > 0).astype("int64")
    plan = ow.plan(ow.Owners(np.arange(200), 2.0, 1e-5), "sample", steps=4, batch_size=20)
    run = ow.Trainer(torch.nn.Linear(3, 2), plan, lr=0.5, evaluate_every=2, progress=False).fit(
        (inputs[:200], labels[:200]), validation=(inputs[200:], labels[200:])
    )
    *earlier, last = run.history
    assert all("classification" not in line["validation"] for line in earlier)
    assert (
        last["validation"]["classification"]["accuracy"]["value"]
        == (last["validation"]["accuracy"])
    )
