import numpy as np
import pytest
import torch
from scipy import stats

import ownerwise as ow
from ownerwise.report.comparison import METRICS, Comparison, difference, differences
from ownerwise.wording import Amount
from tools.report_tools import evaluation, made_run, small_plan, two_methods

ACCURACY, _, _, WORST, STRICTEST, STRICT_HALF, SPREAD = METRICS


def run_ending(label, seed, clinic, cohort=0.8, **options):
    """A run whose last evaluation has the given recalls."""
    run = made_run(label, seed=seed, evaluations=2, **options)
    recalls = {"clinic": clinic, "cohort": cohort, "volunteers": 0.9}
    run.history[-1]["validation"] = evaluation(recalls, dict.fromkeys(recalls, 1.0))
    return run


def test_runs_with_one_label_are_seeds_of_one_method():
    comparison = Comparison.of(two_methods(seeds=3))
    assert [(m.label, len(m.runs)) for m in comparison.methods] == [("IDP-SGD", 3), ("INO-SGD", 3)]
    assert comparison.source == "validation"
    assert [group.name for group in comparison.groups] == ["clinic", "cohort", "volunteers"]


@pytest.mark.parametrize(
    ("labels", "baseline"),
    [
        (["INO-SGD", "DP-SGD", "IDP-SGD"], "IDP-SGD"),
        (["INO-SGD", "DP-SGD"], "DP-SGD"),
        (["IDP-SGD", "DP-SGD"], "DP-SGD"),
        (["mine", "yours"], "mine"),
        (["INO-SGD (scale)", "IDP-SGD (scale)"], "IDP-SGD (scale)"),
    ],
)
def test_methods_are_compared_with_what_they_build_upon(labels, baseline):
    plans = {"DP-SGD": small_plan("uniform")}
    comparison = Comparison.of([made_run(label, plan=plans.get(label)) for label in labels])
    assert comparison.baseline.label == baseline
    assert {method.label for method in comparison.others} == set(labels) - {baseline}


def test_the_baseline_follows_from_settings_whatever_the_labels():
    uniform = small_plan("uniform")
    runs = [
        made_run("INO-SGD"),
        made_run("IDP-SGD, my own", plan=uniform),
        made_run("without weights"),
    ]
    assert Comparison.of(runs).baseline.label == "without weights"
    assert Comparison.of(runs[1:]).baseline.label == "IDP-SGD, my own"


def test_runs_with_paid_releases_are_methods_of_their_own():
    """Their mean with plain runs would be that of no method, whatever their order."""
    paid = small_plan(statistics=ow.ColumnStatistics())
    adaptive = small_plan(clip_norm="adaptive")
    labels = [
        ow.Trainer(torch.nn.Linear(2, 2), plan, lr=1.0).label
        for plan in (paid, adaptive, small_plan())
    ]
    assert labels == ["IDP-SGD paid statistics", "IDP-SGD adaptive clip norm", "IDP-SGD"]
    plans = (paid, adaptive, None)
    runs = [made_run(label, plan=plan) for label, plan in zip(labels, plans, strict=True)]
    comparison = Comparison.of(runs)
    assert comparison.baseline.label == "IDP-SGD"
    assert [method.extras for method in comparison.methods] == [
        frozenset(),
        {"paid statistics"},
        {"an adaptive clip norm"},
    ]


def test_mean_and_standard_deviation_over_seeds():
    comparison = Comparison.of(
        [run_ending("IDP-SGD", seed, clinic=0.5 + 0.1 * seed) for seed in range(3)]
    )
    found = comparison.amounts(comparison.baseline, STRICTEST)
    assert found == Amount(pytest.approx(0.6), pytest.approx(0.1), 3)
    assert comparison.amounts(comparison.baseline, WORST).mean == pytest.approx(0.6)


def test_one_run_has_no_standard_deviation():
    comparison = Comparison.of([made_run()])
    assert comparison.amounts(comparison.baseline, ACCURACY).deviation is None


def test_the_strictest_owner_is_the_group_with_the_least_epsilon():
    run = run_ending("IDP-SGD", 0, clinic=0.9, cohort=0.2)
    comparison = Comparison.of([run])
    assert comparison.amounts(comparison.baseline, STRICTEST).mean == pytest.approx(0.9)
    assert comparison.amounts(comparison.baseline, WORST).mean == pytest.approx(0.2)


def test_test_data_decide_if_every_run_has_them():
    first, second = made_run(), made_run("INO-SGD")
    tested = evaluation({"clinic": 0.1, "cohort": 0.2}, {"clinic": 1.0, "cohort": 1.0})
    first.history[-1]["test"] = tested
    assert Comparison.of([first, second]).source == "validation"
    second.history[-1]["test"] = tested
    both = Comparison.of([first, second])
    assert both.source == "test"
    assert both.amounts(both.baseline, WORST).mean == 0.1
    assert [group.name for group in both.groups] == ["clinic", "cohort"]


def test_differences_say_what_is_better_and_what_may_be_chance():
    runs = [run_ending("IDP-SGD", s, clinic=c) for s, c in enumerate((0.50, 0.51, 0.52))]
    runs += [run_ending("INO-SGD", s, clinic=c, cohort=0.78 + 0.02 * s)
             for s, c in enumerate((0.60, 0.61, 0.62))]  # fmt: skip
    comparison = Comparison.of(runs)
    found = {
        d.metric.key: d for d in differences(comparison, comparison.others[0], comparison.baseline)
    }
    assert found["worst"].by == pytest.approx(0.1)
    assert found["worst"].better
    assert found["worst"].clear
    assert found["spread"].by < 0
    assert found["spread"].better
    # The same change within the noise of the seeds is not clear.
    noisy = [run_ending("IDP-SGD", s, clinic=c) for s, c in enumerate((0.2, 0.5, 0.8))]
    comparison = Comparison.of(noisy + runs[3:])
    found = {
        d.metric.key: d for d in differences(comparison, comparison.others[0], comparison.baseline)
    }
    assert not found["worst"].clear


def test_runs_on_the_same_splits_are_compared_split_by_split():
    """Splits differ far more than methods do, so that only pairs show the difference."""
    gains = {"1": 0.04, "2": 0.05, "3": 0.06}
    clinic = {"1": 0.2, "2": 0.5, "3": 0.7}
    runs = [
        run_ending(label, seed, clinic[split] + (label == "INO-SGD") * gains[split], split=split)
        for label in ("IDP-SGD", "INO-SGD")
        for split in gains
        for seed in (0, 1)
    ]
    comparison = Comparison.of(runs)
    found = difference(comparison, comparison.others[0], comparison.baseline, STRICTEST)
    assert found.by == pytest.approx(0.05)
    error = stats.ttest_1samp(list(gains.values()), 0).confidence_interval(0.95)
    assert found.interval == pytest.approx((error.low, error.high))
    assert found.clear
    assert found.outcome == "gained"
    # without the splits the spread over runs hides it, also if one method lacks a split
    for others in (runs[:-2], [run_ending("INO-SGD", 0, 0.25), *runs]):
        comparison = Comparison.of(others)
        unpaired = difference(comparison, comparison.others[0], comparison.baseline, STRICTEST)
        assert not unpaired.clear


def test_the_stricter_half_is_the_half_of_the_groups_with_the_smallest_budgets():
    budgets = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    run = made_run(budgets=budgets, evaluations=2)
    recalls = {"a": 0.1, "b": 0.3, "c": 0.8, "d": 0.9}
    run.history[-1]["validation"] = evaluation(recalls, dict.fromkeys(recalls, 1.0))
    comparison = Comparison.of([run])
    assert comparison.value(run, STRICT_HALF) == pytest.approx(0.2)
    run.config["group_budgets"] = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 4.0}
    assert comparison.value(run, STRICT_HALF) == pytest.approx(0.4)  # c is as strict as b
    run.config["group_budgets"] = dict.fromkeys(budgets, 1.0)
    assert comparison.value(run, STRICT_HALF) is None


def test_single_runs_leave_chance_unknown():
    comparison = Comparison.of([made_run(), made_run("INO-SGD", lift=0.5)])
    assert all(
        d.clear is None for d in differences(comparison, comparison.others[0], comparison.baseline)
    )


def test_plans_are_told_apart_by_their_hash():
    comparison = Comparison.of(
        [made_run(), made_run("INO-SGD"), made_run("DP-SGD", plan=small_plan("scale"))]
    )
    assert [use.labels for use in comparison.facts.plans] == ["IDP-SGD, INO-SGD", "DP-SGD"]
    partly = Comparison.of([made_run(steps_spent=50), made_run(steps_spent=80, seed=1)])
    assert [use.steps_spent for use in partly.facts.plans] == [80]


def test_a_figure_that_is_missing_in_one_run_is_not_averaged():
    runs = two_methods(seeds=2)
    del runs[0].history[-1]["validation"]["spread"]
    comparison = Comparison.of(runs)
    assert comparison.amounts(comparison.baseline, SPREAD) is None
    assert comparison.amounts(comparison.others[0], SPREAD) is not None


def test_all_problems_are_listed():
    with pytest.raises(ow.OwnerwiseError, match="no runs were passed"):
        Comparison.of([])
    with pytest.raises(ow.OwnerwiseError) as caught:
        Comparison.of([made_run(), "runs/a", np.ones(2)])
    assert len(caught.value.problems) == 2
    assert "run 2 is a str" in caught.value.problems[0]
