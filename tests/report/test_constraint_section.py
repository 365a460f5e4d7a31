"""The report's section about constraints: values, multipliers, satisfied or not, warnings."""

import pytest

from ownerwise.report import card_text, constraint_section, write_report
from ownerwise.report.comparison import Comparison
from tools.report_tools import made_run, small_plan

UPPER, LOWER = "parity ≤ 0.05", "parity ≥ -0.05"


def constrained_run(label="DP-SGD constrained", *, seed=0, gap=0.04, noise=0.01, stuck=False):
    constraints = [
        {"name": UPPER, "sense": "≤", "bound": 0.05},
        {"name": LOWER, "sense": "≥", "bound": -0.05},
    ]
    run = made_run(
        label, seed=seed, plan=small_plan("uniform", release_std=20.0),
        constraints={"constraints": constraints, "cap": 2.0, "ascent": 0.4},
    )  # fmt: skip
    for at, line in enumerate(run.history):
        line["validation"]["constraints"] = {UPPER: gap, LOWER: gap}
        line["constraints"] = at and {
            "values": {UPPER: gap + 0.01, LOWER: gap + 0.01},
            "noise": {UPPER: noise, LOWER: noise},
            "multipliers": {UPPER: 2.0 if stuck else 0.1 * at, LOWER: 0.0},
        }
    return run


def page(runs, path):
    write_report(runs, path / "report.html")
    return (path / "report.html").read_text()


def test_values_bounds_and_multipliers_are_shown(tmp_path):
    text = page([constrained_run(seed=0, gap=0.04), constrained_run(seed=1, gap=0.03)], tmp_path)
    assert 'id="constraints"' in text
    for words in (UPPER, "≥ -0.05", "0.045 ± 0.010", "0.035", "yes", "not private"):
        assert words in text
    assert "one histogram of predictions" in text
    assert "rule that assigns records to cells" in text
    assert f"| Rate constraints | {UPPER}; {LOWER} |" in card_text(constrained_run())
    assert "is larger than the bound" not in text
    assert "stayed at its cap" not in text


def test_the_histogram_is_listed_as_released_beside_an_unconstrained_baseline(tmp_path):
    text = page([made_run("DP-SGD", plan=small_plan("uniform")), constrained_run()], tmp_path)
    assert "one histogram of predictions" in text


def test_a_broken_constraint_says_by_how_much(tmp_path):
    assert "no, by 0.030" in page([constrained_run(gap=0.08)], tmp_path)


def test_warnings_for_noise_and_for_a_multiplier_at_its_cap():
    (loud,) = {w.partition(":")[2] for w in warnings_of(noise=0.06) if UPPER in w}
    assert "0.060, is larger than the bound 0.05" in loud
    assert len(warnings_of(noise=0.06)) == 2
    (stuck,) = warnings_of(stuck=True)
    assert "stayed at its cap of 2 throughout" in stuck
    assert warnings_of() == []


def warnings_of(**options):
    return constraint_section.warnings(Comparison.of([constrained_run(**options)]))


def test_curves_have_a_line_for_every_constraint_and_method():
    comparison = Comparison.of(
        [constrained_run(), constrained_run("other", seed=1), made_run("DP-SGD")]
    )
    figure = constraint_section.figure(comparison)
    assert [panel.title for panel in figure.panels] == ["DP-SGD constrained", "other"]
    assert [entry.label for entry in figure.legend] == [UPPER, LOWER]
    for panel in figure.panels:
        assert list(panel.views) == ["Multiplier", "Noisy value"]
        lines = [t for t in panel.views["Multiplier"].traces if t["mode"] == "lines+markers"]
        assert [line["name"] for line in lines] == ["parity ≤ 0.05", "parity ≥ -0.05"]
        assert lines[0]["y"][-1] == pytest.approx(2.0)


def test_runs_without_constraints_have_no_section(tmp_path):
    assert constraint_section.figure(Comparison.of([made_run()])) is None
    assert 'id="constraints"' not in page([made_run()], tmp_path)
