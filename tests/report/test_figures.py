import json

import numpy as np
import pytest
from scipy import stats

import ownerwise as ow
from ownerwise.report import figures
from ownerwise.report.comparison import Comparison
from ownerwise.report.importance_section import figure as importance_figure
from ownerwise.report.mechanism_sections import ino
from ownerwise.report.spending import spending
from tools.report_tools import (
    INO_SETTINGS,
    evaluation,
    made_run,
    small_plan,
    two_methods,
    wide_plan,
)


def traces_of(figure, panel=0, view=0):
    return list(figure.panels[panel].views.values())[view].traces


def all_figures(comparison):
    made = [
        figures.learning_curves(comparison),
        figures.gain_against_budget(comparison),
        figures.worst_and_overall(comparison),
        figures.trade_off(comparison),
        spending(comparison),
        importance_figure(comparison, ino),
    ]
    return [figure for figure in made if figure is not None]


def without_tokens(value):
    if isinstance(value, dict):
        return {name: without_tokens(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_tokens(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


def test_plotly_accepts_every_chart():
    from plotly import graph_objects

    made = all_figures(Comparison.of(two_methods(seeds=2)))
    assert len(made) == 6
    for figure in made:
        for panel in figure.panels:
            assert panel.description
            for view in panel.views.values():
                graph_objects.Figure(without_tokens(view.traces), without_tokens(view.layout))


def test_learning_curves_show_every_group_and_method_with_a_band():
    runs = two_methods(seeds=3)
    figure = figures.learning_curves(Comparison.of(runs))
    assert [panel.title for panel in figure.panels] == [
        "Owner clinic · ε 0.5 per record",
        "Owner cohort · ε 2 per record",
        "Owner volunteers · ε 8 per record",
    ]
    band, line, *_ = traces_of(figure)
    first = [run.history[7]["validation"]["groups"]["clinic"]["recall"] for run in runs[:3]]
    assert line["name"] == "IDP-SGD"
    assert line["y"][7] == pytest.approx(np.mean(first), rel=1e-4)
    assert line["customdata"][7] == pytest.approx(np.std(first, ddof=1), rel=1e-2)
    assert band["y"][7] == pytest.approx(np.mean(first) - np.std(first, ddof=1), rel=1e-3)
    loss = traces_of(figure, view=1)[1]
    assert loss["y"][0] == pytest.approx(2.3)


def test_no_more_than_twelve_groups_are_drawn_at_first():
    budgets = {str(i): 0.5 + i for i in range(30)}
    figure = figures.learning_curves(Comparison.of([made_run(budgets=budgets)]))
    assert len(figure.panels) == 30
    assert sum(panel.shown for panel in figure.panels) == 12
    assert figure.panels[0].shown
    assert figure.panels[-1].shown


def test_curves_are_thinned_the_more_there_are():
    budgets = {str(i): 0.5 + i for i in range(50)}
    runs = [made_run(label, budgets=budgets, evaluations=400, steps=399)
            for label in ("IDP-SGD", "INO-SGD", "other")]  # fmt: skip
    figure = figures.learning_curves(Comparison.of(runs))
    points = [len(t["x"]) for p in figure.panels for v in p.views.values() for t in v.traces]
    assert max(points) < 200
    assert sum(points) < 150_000
    overall = traces_of(figures.worst_and_overall(Comparison.of(runs)))
    assert {len(trace["x"]) for trace in overall} == {300}


def test_gain_is_method_minus_baseline_with_pearsons_r():
    budgets = {str(i): e for i, e in enumerate([0.5, 0.7, 1.0, 2.0, 4.0, 8.0])}
    runs = [made_run(lb, seed=s, lift=f, budgets=budgets)
            for lb, f in (("IDP-SGD", 0.0), ("INO-SGD", 0.6)) for s in range(3)]  # fmt: skip
    figure = figures.gain_against_budget(Comparison.of(runs))
    recalls = np.array(
        [
            [run.history[-1]["validation"]["groups"][name]["recall"] for name in budgets]
            for run in runs
        ]
    )
    gains = 100 * (recalls[3:].mean(axis=0) - recalls[:3].mean(axis=0))
    points, line = traces_of(figure)
    np.testing.assert_allclose(points["y"], gains, rtol=1e-4)
    np.testing.assert_allclose(points["x"], list(budgets.values()))
    spread = np.hypot(recalls[3:].std(axis=0, ddof=1), recalls[:3].std(axis=0, ddof=1))
    np.testing.assert_allclose(points["error_y"]["array"], 100 * spread, rtol=1e-2)
    eps = np.array(list(budgets.values()))
    fit = stats.linregress(eps, gains)
    np.testing.assert_allclose(line["y"], fit.intercept + fit.slope * eps[[0, -1]], rtol=1e-3)
    for values, scale in ((eps, "ε"), (np.log10(eps), "log ε")):
        r = f"{stats.pearsonr(values, gains).statistic:.2f}".replace("-", "−")
        assert f"r = {r} with {scale}" in figure.caption
    assert "n = 6" in figure.caption


def test_few_or_equal_points_have_no_correlation():
    budgets = {"a": 1.0, "b": 2.0, "c": 3.0}
    few = figures.gain_against_budget(
        Comparison.of([made_run(budgets=budgets), made_run("INO-SGD", lift=0.5, budgets=budgets)])
    )
    assert "too few distinct points" in few.caption
    assert len(traces_of(few)) == 1
    runs = [made_run(label, budgets=dict.fromkeys("abcd", 1.0)) for label in ("a", "b")]
    assert "too few distinct points" in figures.gain_against_budget(Comparison.of(runs)).caption


def test_points_of_many_owners_have_no_names():
    budgets = {f"patient-{i}": e for i, e in enumerate(np.geomspace(0.3, 9, 60).tolist())}
    runs = [made_run(label, plan=wide_plan(), budgets=budgets, evaluations=3)
            for label in ("IDP-SGD", "INO-SGD")]  # fmt: skip
    figure = figures.gain_against_budget(Comparison.of(runs))
    assert len(traces_of(figure)[0]["x"]) == 60
    assert "patient" not in json.dumps(traces_of(figure))


def test_a_single_method_has_neither_gain_nor_trade_off():
    comparison = Comparison.of([made_run(), made_run(seed=1)])
    assert figures.gain_against_budget(comparison) is None
    assert figures.trade_off(comparison) is None
    assert figures.learning_curves(comparison) is not None


def test_without_validation_no_utility_is_drawn():
    comparison = Comparison.of(
        [made_run(with_validation=False), made_run("INO-SGD", with_validation=False)]
    )
    assert [figure.name for figure in all_figures(comparison)] == ["spending", "importance"]


def test_trade_off_has_a_point_per_run_and_a_mean_with_bars_per_method():
    runs = two_methods(seeds=3)
    singles, means = np.split(np.array(traces_of(figures.trade_off(Comparison.of(runs)))), 2)
    accuracies = [100 * run.history[-1]["validation"]["accuracy"] for run in runs[:3]]
    np.testing.assert_allclose(singles[0]["x"], accuracies, rtol=1e-4)
    assert means[0]["x"][0] == pytest.approx(np.mean(accuracies), rel=1e-4)
    assert means[0]["error_x"]["array"][0] == pytest.approx(np.std(accuracies, ddof=1), rel=1e-2)


def test_worst_group_is_the_worst_at_each_step():
    run = made_run(evaluations=3)
    recalls = {"clinic": 0.9, "cohort": 0.3, "volunteers": 0.5}
    run.history[1]["validation"] = evaluation(recalls, dict.fromkeys(recalls, 1.0))
    assert traces_of(figures.worst_and_overall(Comparison.of([run])))[0]["y"][1] == 0.3


def test_spending_ends_at_the_budget_and_pales_after_the_steps_taken():
    plan = small_plan()
    figure = spending(Comparison.of([made_run(steps_spent=120)]))
    taken, planned, target, *rest = traces_of(figure)
    assert len(rest) == 6
    assert (taken["x"][-1], planned["x"][0], planned["x"][-1]) == (120, 120, 200)
    assert taken["y"][-1] == pytest.approx(plan.epsilon(steps=120).min(), rel=1e-3)
    assert planned["y"][-1] == pytest.approx(0.5, rel=2e-3)
    assert planned["opacity"] < taken["opacity"]
    assert target["y"] == [0.5, 0.5]


def test_every_distinct_plan_has_a_panel_of_spending():
    runs = [made_run(), made_run("INO-SGD"), made_run("DP-SGD", plan=small_plan("uniform"))]
    panels = spending(Comparison.of(runs)).panels
    assert [p.title for p in panels] == ["Plan of IDP-SGD, INO-SGD", "Plan of DP-SGD"]


def test_importance_weights_are_those_of_the_typical_batch():
    figure = importance_figure(Comparison.of([made_run("INO-SGD")]), ino)
    (line,) = traces_of(figure, panel=1)
    expected = ow.INO(tail_length=0.4 * 64).weights(np.arange(64, 0, -1.0), np.ones(64))
    np.testing.assert_allclose(line["y"], expected, rtol=1e-4)
    (tail,) = traces_of(figure, panel=0)
    assert (tail["y"][0], tail["y"][-1]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "weights", [None, {**INO_SETTINGS, "shape": "Steps([0.5, 0])"}, {"kind": "Mine"}]
)
def test_weights_without_a_known_tail_are_not_drawn(weights):
    comparison = Comparison.of([made_run("INO-SGD", weights=weights)])
    assert importance_figure(comparison, ino) is None


def test_losses_that_are_not_known_leave_gaps_and_no_warning():
    run = made_run(evaluations=4)
    for line in run.history:
        for group in line["validation"]["groups"].values():
            group["loss"] = None
    figure = figures.learning_curves(Comparison.of([run]))
    assert traces_of(figure, view=1)[0]["y"] == [None] * 4
    assert traces_of(figure, view=0)[0]["y"][0] == pytest.approx(0.1)
