"""The algebra of rates, and every ready-made constraint, against rates counted by hand."""

import math

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.mechanisms import constraints as rates

RANDOM = np.random.default_rng(2)
SEX = RANDOM.choice(["F", "M", "X"], 400)
LABEL = RANDOM.integers(0, 3, 400)
PREDICTED = np.where(RANDOM.random(400) < 0.6, LABEL, RANDOM.integers(0, 3, 400))
PART = ow.Partition({"sex": ("F", "M", "X"), "label": (0, 1, 2)})


def histogram(part=PART, sex=SEX):
    cells = part.targets(LABEL, {"sex": sex})[:, 1].numpy()
    found = np.zeros(part.shape)
    np.add.at(found, (cells, PREDICTED), 1)
    return found


def value(constraint):
    return constraint.value(histogram())


def share(event, among):
    return float(event[among].mean())


def test_a_rate_is_a_share_among_those_it_is_about():
    one = ow.rate(pred=1, where=PART["sex"] == "F", given=PART["label"] == 1) >= 0.8
    among = (SEX == "F") & (LABEL == 1)
    assert value(one) == pytest.approx(share(PREDICTED == 1, among))
    assert one.name == "rate(predicted = 1 | sex = F and label = 1) ≥ 0.8"
    assert one.excess(0.7) == pytest.approx(0.1)
    several = ow.rate(pred=[0, 2], where=PART.everyone) <= 0.5
    assert value(several) == pytest.approx(share(PREDICTED != 1, LABEL >= 0))
    assert several.excess(0.7) == pytest.approx(0.2)


def test_rates_add_subtract_and_compare():
    women, men = (ow.rate(pred=1, where=PART["sex"] == sex) for sex in "FM")
    a, b = (share(PREDICTED == 1, sex == SEX) for sex in "FM")
    for found, expected in [
        (women - men, a - b),
        (2 * women + 0.5 * men + 0.25, 2 * a + 0.5 * b + 0.25),
        (1 - women, 1 - a),
        (-men - 1, -b - 1),
    ]:
        assert value(found <= 0.1) == pytest.approx(expected)
    both = women <= men
    assert value(both) == pytest.approx(a - b)
    assert (both.sense, both.bound) == ("≤", 0.0)
    assert str(women - men) == "rate(predicted = 1 | sex = F) - rate(predicted = 1 | sex = M)"


def test_a_bound_on_both_sides_is_two_constraints():
    """Python takes low <= rate <= high as two comparisons, and would keep the second only."""
    women, men = (ow.rate(pred=1, where=PART["sex"] == sex) for sex in "FM")
    for use in (
        lambda: 0.1 <= women <= 0.5,
        lambda: women >= 0.1 and women <= 0.5,
        lambda: not women <= 0.5,  # pyright: ignore[reportGeneralTypeIssues]
    ):
        with pytest.raises(ow.OwnerwiseError, match="write two constraints"):
            use()
    with pytest.raises(ow.OwnerwiseError, match="compare it with a bound"):
        _ = (women or men) <= 0.5
    assert len(ow.RateConstraints([women >= 0.1, women <= 0.5]).names) == 2


def test_gaps_are_held_from_both_sides_for_every_group():
    found = rates.demographic_parity(PART, "sex", max_gap=0.1, pred=2)
    assert len(found) == 6
    for sex, upper, lower in zip("FMX", found[::2], found[1::2], strict=True):
        gap = share(PREDICTED == 2, sex == SEX) - share(PREDICTED == 2, sex != SEX)
        assert value(upper) == value(lower) == pytest.approx(gap)
        assert upper.excess(gap) == pytest.approx(gap - 0.1)
        assert lower.excess(gap) == pytest.approx(-0.1 - gap)
    assert found[0].name == "parity of 2: sex F - others ≤ 0.1"
    assert len(rates.demographic_parity(PART, "sex", max_gap=0.1)) == 18
    two = ow.Partition({"sex": ("F", "M")}, classes=2)
    names = [one.name for one in rates.demographic_parity(two, "sex", max_gap=0.1)]
    assert names == ["parity of 1: sex F - M ≤ 0.1", "parity of 1: sex F - M ≥ -0.1"]


def test_odds_and_opportunity_are_gaps_among_true_classes():
    odds = {one.name: value(one) for one in rates.equalized_odds(PART, "sex", max_gap=0.1, pred=1)}
    assert len(odds) == 18
    for label in range(3):
        among = label == LABEL
        gap = share(PREDICTED == 1, among & (SEX == "M")) - share(
            PREDICTED == 1, among & (SEX != "M")
        )
        name = f"odds of 1: sex M - others, label = {label} ≤ 0.1"
        assert odds[name] == pytest.approx(gap)
    chance = rates.equal_opportunity(PART, "sex", max_gap=0.1, positive=1)
    assert value(chance[2]) == pytest.approx(odds["odds of 1: sex M - others, label = 1 ≤ 0.1"])


@pytest.mark.parametrize("by", [None, "sex"])
def test_usual_rates_overall_and_by_group(by):
    groups = [LABEL >= 0] if by is None else [sex == SEX for sex in "FMX"]
    made = {
        "false negatives": rates.false_negative_rate(PART, max_rate=0.2, positive=1, by=by),
        "false positives": rates.false_positive_rate(PART, max_rate=0.2, positive=1, by=by),
        "recall": rates.recall(PART, min_rate=0.5, positive=0, by=by),
        "precision": rates.precision(PART, min_rate=0.5, positive=0, by=by),
        "selection": rates.selection_rate(PART, max_rate=0.5, pred=2, by=by),
        "error": rates.error_rate(PART, max_rate=0.5, by=by),
    }
    for at, group in enumerate(groups):
        expected = {
            "false negatives": share(PREDICTED != 1, group & (LABEL == 1)),
            "false positives": share(PREDICTED == 1, group & (LABEL != 1)),
            "recall": share(PREDICTED == 0, group & (LABEL == 0)),
            "precision": share(LABEL == 0, group & (PREDICTED == 0)),
            "selection": share(PREDICTED == 2, group),
            "error": share(PREDICTED != LABEL, group),
        }
        for kind, found in made.items():
            assert len(found) == len(groups)
            assert value(found[at]) == pytest.approx(expected[kind]), kind
            assert found[at].name.startswith(kind)
    assert made["recall"][0].sense == "≥"
    assert len(rates.selection_rate(PART, max_rate=0.5, min_rate=0.1, by=by)) == 2 * len(groups)


@pytest.mark.parametrize("by", [None, "sex"])
def test_predictions_are_balanced_against_labels(by):
    groups = [None] if by is None else list("FMX")
    found = rates.balanced_predictions(PART, 0.02, by=by)
    expected = []
    for group in groups:
        among = [at for at in range(len(LABEL)) if group is None or SEX[at] == group]
        for label in range(3):
            predicted = sum(1.0 for at in among if PREDICTED[at] == label) / len(among)
            true = sum(1.0 for at in among if LABEL[at] == label) / len(among)
            expected += [predicted - true] * 2
    assert [value(one) for one in found] == pytest.approx(expected, abs=1e-12)
    assert [one.sense for one in found] == ["≤", "≥"] * (len(found) // 2)
    assert {one.bound for one in found[::2]} == {0.02}
    assert {one.bound for one in found[1::2]} == {-0.02}
    words = "balance of 1: predicted - true share"
    assert found[2].name == words + (" ≤ 0.02" if by is None else " in sex = F ≤ 0.02")


def test_one_of_two_classes_is_balanced():
    two = ow.Partition({"label": (0, 1)})
    names = [one.name for one in rates.balanced_predictions(two, 0.1)]
    assert names == [f"balance of 1: predicted - true share {end}" for end in ("≤ 0.1", "≥ -0.1")]


def test_a_class_without_records_is_balanced_without_predictions():
    """Records of classes 0 and 1 alone: whatever is predicted as class 2 is too much."""
    counts = np.array([[5.0, 3.0, 2.0], [1.0, 7.0, 2.0], [0.0, 0.0, 0.0]])
    found = rates.balanced_predictions(ow.Partition({"label": (0, 1, 2)}), 0.1)
    assert [one.value(counts) for one in found[::2]] == pytest.approx([-0.2, 0.0, 0.2])
    assert found[4].excess(0.2) == pytest.approx(0.1)


def test_a_group_without_records_has_no_value():
    counts = histogram(sex=np.where(SEX == "X", "F", SEX))
    found = rates.error_rate(PART, max_rate=0.5, by="sex")
    assert [one.value(counts) is None for one in found] == [False, False, True]


def test_meaningless_rates_are_refused():
    women = PART["sex"] == "F"
    for make, words in [
        (
            lambda: ow.rate(pred=1, where=women & (PART["sex"] == "M")),
            "no cell of the partition satisfies",
        ),
        (lambda: ow.rate(where=women), "got both or neither"),
        (lambda: ow.rate(pred=1), "where=part.everyone"),
        (lambda: ow.rate(pred=5, where=women), "predicted = 5: expected one of 0, 1, 2"),
        (lambda: ow.rate(pred=1, where=women) <= float("nan"), "a finite bound"),
        (lambda: rates.demographic_parity(PART, "sex", max_gap=2), "a number from 0 to 1"),
        (lambda: rates.demographic_parity(PART, "age", max_gap=0.1), "no column 'age'"),
        (lambda: rates.balanced_predictions(PART, -0.1), r"width=-0.1: expected a number from 0"),
        (lambda: rates.balanced_predictions(PART, math.nan), r"width=nan: expected a number"),
        (
            lambda: rates.balanced_predictions(ow.Partition({}, classes=2), 0.1),
            "no column 'label'",
        ),
        (lambda: rates.selection_rate(PART), "expected max_rate, min_rate"),
        (lambda: rates.error_rate(ow.Partition({}, classes=2), max_rate=0.1), "no column 'label'"),
        (
            lambda: rates.demographic_parity(
                ow.Partition({"sex": ("F",)}, classes=2), "sex", max_gap=0.1
            ),
            "a gap needs at least two groups",
        ),
    ]:
        with pytest.raises(ow.OwnerwiseError, match=words):
            make()
