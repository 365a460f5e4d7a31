"""The demonstration: the same search for every method, honest words, and a report that opens."""

from pathlib import Path

import numpy as np
import pytest

from ownerwise.cli import demo_comparison
from ownerwise.cli.main import main
from ownerwise.report.comparison import Comparison
from ownerwise.runs import CARD, REPORT, Run

pytest.importorskip("sklearn")

TINY = demo_comparison.DemoSearch(
    (0.5, 1.0), (4.0,), (101,), (1, 2), splits=2, steps=6, evaluations=2
)


@pytest.fixture(scope="module")
def demo():
    return demo_comparison.Demo(TINY)


@pytest.fixture(scope="module")
def compared(demo):
    return demo.compare(progress=False)


def test_every_method_has_the_same_search_splits_and_seeds(compared):
    assert list(compared) == [method.label for method in demo_comparison.METHODS]
    for runs in compared.values():
        assert [(run.split, run.seed) for run in runs] == [
            (split, seed) for split in "12" for seed in (1, 2)
        ]
        assert {run.plan.clip_norm for run in runs} <= {0.5, 1.0}
        assert all(run.updates == 6 for run in runs)
    assert TINY.runs_per_method == 2 * (2 * 1 + 2)


def test_parts_do_not_overlap_and_hold_every_digit_equally_often_in_every_split(demo):
    for parts in demo.splits:
        assert sum(map(len, parts)) == 1797
        rows = np.concatenate([part.inputs.reshape(len(part), -1) for part in parts])
        assert len(np.unique(rows, axis=0)) == len(np.unique(np.round(rows, 4), axis=0)) > 1790
        for part, first in zip(parts, demo.splits[0], strict=True):
            assert (np.bincount(part.targets) == np.bincount(first.targets)).all()
        assert (parts[0].targets.astype(str) == demo.assignment.record_owner).all()
    assert (demo.splits[0][0].inputs != demo.splits[1][0].inputs).any()


def test_budgets_are_kept_and_individual_ones_spent(demo, compared):
    budgets = np.array(list(demo.assignment.group_budgets.values()))
    for label, runs in compared.items():
        spent = runs[0].epsilon()
        assert (spent <= budgets).all()
        assert (spent[-1] > 5) == (label != "DP-SGD")
        assert all(("calibration" in run.history[-1]) == ("calibrated" in label) for run in runs)


def test_the_tables_show_the_test_records_and_every_chosen_cell(demo, compared):
    comparison = Comparison.of([run for runs in compared.values() for run in runs])
    assert comparison.baseline.label == "IDP-SGD"
    heading, *lines = demo_comparison.table(comparison)
    assert "Stricter half" in heading
    for line, method in zip(lines, comparison.methods, strict=True):
        accuracies = [run.history[-1]["test"]["accuracy"] for run in compared[method.label]]
        assert line.startswith(method.label)
        assert f"{100 * np.mean(accuracies):.1f} ± " in line
    owners = list(demo_comparison.owner_table(comparison, demo.assignment.group_budgets))
    assert len(owners) == 11
    recalls = [run.history[-1]["test"]["groups"]["0"]["recall"] for run in compared["IDP-SGD"]]
    assert owners[1].split()[:3] == ["0", "1", f"{100 * np.mean(recalls):.1f}"]
    for line, method in zip(
        demo_comparison.chosen_cells(comparison), comparison.methods, strict=True
    ):
        assert line.startswith(f"{method.label}: ")
        assert line.count(" and ") == 2


def test_the_command_prints_tables_and_writes_a_report(tmp_path, capsys):
    report = tmp_path / "report.html"
    folder = tmp_path / "run"
    folder.mkdir()
    assert main(["demo", "--quick", "--out", str(report), "--folder", str(folder)]) == 0
    printed = capsys.readouterr().out
    for method in demo_comparison.METHODS:
        assert method.label in printed
    assert "NOT private" in printed
    assert "nothing was tuned" in printed
    assert "<html" in report.read_text(encoding="utf-8")[:200]
    run = Run.load(tmp_path / "run-2")  # the folder exists, and a run is never overwritten
    assert run.private
    assert (run.plan.records == 1).all()
    assert (run.epsilon() <= run.plan.targets).all()
    assert sorted(set(run.plan.targets)) == [*range(1, 11)]
    assert "all that its owner has" in printed
    *_, private, comparison, _, init, train, guide = printed.strip().splitlines()
    assert private.strip().startswith(str(run.folder / REPORT))
    assert str(run.folder / CARD) in private
    assert comparison.strip().startswith(str(report))
    assert init.split()[:3] == ["ownerwise", "init", "mine.csv"]
    assert train.split()[:3] == ["ownerwise", "train", "mine.toml"]
    assert (Path(__file__).parents[2] / guide.split()[-1]).exists()
    document = (run.folder / REPORT).read_text(encoding="utf-8")
    assert '<div class="banner good"' in document
    assert '<div class="banner bad"' not in document
    assert "**Private.**" in (run.folder / CARD).read_text(encoding="utf-8")
