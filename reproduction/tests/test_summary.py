"""Summaries over seeds, against numbers worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from made_results import BUDGETS, result
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction import summary


def test_numbers_of_a_run():
    measured = summary.measure(result())
    assert measured["accuracy"] == pytest.approx(0.5)
    assert measured["worst_group"] == 0.2
    assert measured["strictest"] == 0.2  # a, epsilon 1
    assert measured["strict"] == pytest.approx(0.3)  # a and b: 2 is below the mean, 3 is not
    assert measured["spread"] == pytest.approx(math.sqrt(0.05))


def test_no_strict_owners_where_all_budgets_are_equal():
    measured = summary.measure(result(budgets=dict.fromkeys("abcd", 1.89)))
    assert "strict" not in measured
    assert "strictest" not in measured


def test_mean_and_deviation_over_seeds():
    runs = [result(seed=0), result(seed=1, recalls=(0.4, 0.4, 0.6, 0.8))]
    found = summary.over_seeds(runs)
    assert found["accuracy"] == summary.Amount(
        pytest.approx(0.525), pytest.approx(0.05 / math.sqrt(2)), 2
    )
    assert found["worst_group"].mean == pytest.approx(0.3)
    assert found["worst_group"].deviation == pytest.approx(0.2 / math.sqrt(2))
    assert summary.over_seeds(runs[:1])["accuracy"].deviation is None
    assert summary.group_recalls(runs)["a"].mean == pytest.approx(0.3)


def test_gain_against_budget():
    before = [result(seed=0), result(seed=1, recalls=(0.3, 0.4, 0.6, 0.8)), result(seed=7)]
    after = [
        result("ino", 0, (0.5, 0.6, 0.6, 0.7)),
        result("ino", 1, (0.5, 0.5, 0.6, 0.8)),
        result("ino", 9, (1.0, 1.0, 1.0, 1.0)),  # has no partner
    ]
    found = summary.gain(before, after)
    assert found.seeds == 2
    gains = [0.25, 0.15, 0.0, -0.05]
    assert list(found.by_group.values()) == pytest.approx(gains)
    x, y = np.array(list(BUDGETS.values())) - 3.0, np.array(gains) - np.mean(gains)
    r = float(x @ y / math.sqrt((x @ x) * (y @ y)))
    assert found.correlation == pytest.approx(r)
    t = r * math.sqrt(2 / (1 - r * r))  # n - 2 = 2
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 2))
    half = stats.norm.ppf(0.975) / math.sqrt(1)  # n - 3 = 1, Fisher
    expected = [math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)]
    assert found.interval == pytest.approx(expected)
    assert found.correlation == pytest.approx(stats.pearsonr(list(BUDGETS.values()), gains)[0])


def test_gain_that_says_nothing_of_budgets():
    same = dict.fromkeys("abcd", 2.0)
    equal = summary.gain(
        [result(budgets=same)], [result("ino", recalls=(0, 0, 0, 1), budgets=same)]
    )
    assert equal.correlation is equal.interval is equal.p is None
    assert summary.gain([result()], [result("ino", 1)]) is None
    assert summary.gain([result()], [result("class-budget-0=3", budgets=same)]) is None


def test_initial_drop():
    drops = summary.drops([result(seed=0), result(seed=1)])
    assert drops == {"a": summary.Drop(first=10.0, last=10.0, depth=0.5, seeds=2)}


def test_losses_that_are_not_finite_are_no_drop():
    bad = result()
    for line in bad["history"]:
        line["groups"]["a"]["loss"] = None
    assert summary.drops([bad]) == {}
    assert summary.drops([bad, result()])["a"].seeds == 1


def test_time_of_an_epoch():
    # 20 steps of 5 records are two epochs of 50 records, in 8 seconds
    assert summary.epoch_seconds([result(), result(train_seconds=4.0)]) == pytest.approx(3.0)
    assert summary.epoch_seconds([result(plans=[])]) is None


def test_runs_are_sorted_into_studies():
    found = summary.studies(
        [
            result("lowered-0.1"),
            result("ino"),
            result("idp"),
            result("idp", profile="short"),
            result("idp", changes=['training.clipping="auto_s"']),
        ]
    )
    assert [study.heading for study in found] == [
        "digits",
        "digits (short profile)",
        'digits (training.clipping="auto_s")',
    ]
    assert list(found[0].methods) == ["idp", "ino", "lowered-0.1"]
    assert [study.name for study in found] == [
        "digits/paper",
        "digits/short",
        "digits/clipping-auto_s",
    ]
    with pytest.raises(OwnerwiseError, match="two results for seed 0"):
        summary.studies([result(), result()])


@pytest.mark.parametrize(
    ("profile", "changes", "expected"),
    [
        ("paper", [], "paper"),
        ("short", [], "short"),
        ("paper", ["training.lr=2.0"], "lr-2.0"),
        ("short", ["owners.assignment.budgets=[0.5, 3]"], "short-budgets-0.5-3"),
        ("paper", ["training.lr=1.0", 'plan.method="scale"'], "method-scale-lr-1.0"),
    ],
)
def test_a_variant_is_a_plain_folder_name(profile, changes, expected):
    assert summary.variant(profile, changes) == expected


def test_studies_that_would_share_a_folder_are_refused():
    runs = [result(changes=["plan.schedule=1"]), result(changes=["training.schedule=1"])]
    with pytest.raises(OwnerwiseError, match="would share the folder digits/schedule-1"):
        summary.studies(runs)


def test_notes_follow_a_method_wherever_it_is_named():
    marked = result("top", not_private=["science: fixed seed 0", "upper bound"], label="top")
    (study,) = summary.studies([marked])
    assert study.label("top") == "top (upper bound)"


def test_some_of_many():
    assert summary.spread_out(list("abc"), 4) == ["a", "b", "c"]
    assert summary.spread_out(list("abcdefg"), 3) == ["a", "d", "g"]
