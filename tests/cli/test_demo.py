"""The demonstration: the same search for every method, honest words, and a report that opens."""

import numpy as np
import pytest

from ownerwise.cli import demo_comparison
from ownerwise.cli.main import main
from ownerwise.wording import Amount

pytest.importorskip("sklearn")

TINY = demo_comparison.DemoSearch((0.5, 1.0), (4.0,), (101,), (1, 2), steps=6, evaluations=2)


@pytest.fixture(scope="module")
def demo():
    return demo_comparison.Demo(TINY)


@pytest.fixture(scope="module")
def compared(demo):
    return demo.compare(progress=False)


def test_every_method_has_the_same_search_and_seeds(demo, compared):
    assert list(compared) == [method.label for method in demo_comparison.METHODS]
    for runs in compared.values():
        assert [run.seed for run in runs] == [1, 2]
        assert {run.plan.clip_norm for run in runs} <= {0.5, 1.0}
        assert all(run.updates == 6 for run in runs)
    assert TINY.runs_per_method == 2 * 1 + 2


def test_parts_do_not_overlap_and_hold_every_digit(demo):
    parts = demo.parts
    assert sum(map(len, parts)) == 1797
    rows = np.concatenate([part.inputs.reshape(len(part), -1) for part in parts])
    assert len(np.unique(rows, axis=0)) == len(np.unique(np.round(rows, 4), axis=0)) > 1790
    for part in parts:
        assert len(np.unique(part.targets)) == 10


def test_budgets_are_kept_and_individual_ones_spent(demo, compared):
    budgets = np.array(list(demo.assignment.group_budgets.values()))
    for label, runs in compared.items():
        spent = runs[0].epsilon()
        assert (spent <= budgets).all()
        assert (spent[-1] > 5) == (label != "DP-SGD")


def test_summaries_are_those_of_the_test_records(demo, compared):
    for summary in demo.summaries(compared):
        tests = [run.history[-1]["test"] for run in compared[summary.label]]
        accuracies = [test["accuracy"] for test in tests]
        assert summary.figures["overall"] == Amount.of(accuracies)
        worst = [test["worst_group"]["recall"] for test in tests]
        assert summary.figures["worst owner"].mean == pytest.approx(np.mean(worst))
        strict = [test["groups"][demo.strictest]["recall"] for test in tests]
        assert summary.figures["strictest owner"].mean == pytest.approx(np.mean(strict))


def summary_of(label, overall, spread, std=0.01):
    figures = {"overall": Amount(overall, std, 8), "spread": Amount(spread, std, 8)}
    return demo_comparison.DemoSummary(label, 1.0, 1.0, figures, {}, (1.0, 2.0))


def test_the_words_say_what_was_gained_lost_and_left_open():
    plain = summary_of(demo_comparison.PLAIN, 0.70, 0.20)
    base = summary_of(demo_comparison.BASELINE, 0.80, 0.20)
    better = summary_of("better", 0.90, 0.10)
    worse = summary_of("worse", 0.70, 0.30)
    same = summary_of("same", 0.801, 0.199)
    first, *lines = demo_comparison.findings([plain, base, better, worse, same])
    assert first.startswith(
        "IDP-SGD vs DP-SGD, in percentage points: gained: overall +10.0; no clear"
    )
    assert "gained: overall +10.0, spread -10.0." in lines[0]
    assert "lost: overall -10.0, spread +10.0." in lines[1]
    assert "no clear difference: overall +0.1, spread -0.1." in lines[2]


def test_the_command_prints_tables_and_writes_a_report(tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main(["demo", "--quick", "--out", str(report)]) == 0
    printed = capsys.readouterr().out
    for method in demo_comparison.METHODS:
        assert method.label in printed
    assert "NOT private" in printed
    assert "nothing was tuned" in printed
    assert "<html" in report.read_text(encoding="utf-8")[:200]
