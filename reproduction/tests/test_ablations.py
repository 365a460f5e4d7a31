"""Ablations: which methods belong to them, and what their figures show."""

import pytest
from matplotlib.container import BarContainer

from made_results import result
from ownerwise_reproduction import ablations, summary


def made(method, recalls=(0.2, 0.4, 0.6, 0.8), **weights):
    slug = method.replace(":", "-").replace("/", "-")
    return result(slug, 0, recalls, spec=method, config={"weights": weights})


def study_of(*results):
    (study,) = summary.studies(list(results))
    return study


@pytest.fixture
def study():
    return study_of(
        made("idp"),
        made("ino", (0.3, 0.4, 0.6, 0.8), tail=0.4),
        made("ino:0.8", (0.4, 0.4, 0.4, 0.4), tail=0.8),
        made("ino:0.2", (0.1, 0.4, 0.6, 0.8), tail=0.2),
        made("ino-shape:0.5/2", tail=0.4),
        made("ino-shape:2/2", (0.6, 0.6, 0.6, 0.6), tail=0.4),
        made("ino-shape:steps", tail=0.4),
        made("ino-order:random", tail=0.4),
        made("lowered:0.1"),
    )


def test_methods_are_told_apart(study):
    assert ablations.main_methods(study) == ["idp", "ino", "lowered-0.1"]
    alone = study_of(made("ino:0.8", tail=0.8))
    assert ablations.main_methods(alone) == ["ino-0.8"]
    tails, orders = ablations.part(study, "ino"), ablations.part(study, "ino-order")
    assert list(tails.methods) == ["idp", "ino", "ino-0.2", "ino-0.8"]
    assert list(orders.methods) == ["idp", "ino", "ino-order-random"]
    assert ablations.part(study_of(made("idp"), made("ino")), "ino") is None
    assert ablations.part(study_of(made("uniform")), "ino") is None


def test_only_seeds_that_all_have_are_compared():
    more = [made("idp"), made("idp") | {"seed": 1}, made("ino:0.8", tail=0.8) | {"seed": 1}]
    found = ablations.part(study_of(*more), "ino")
    assert {name: [run["seed"] for run in runs] for name, runs in found.methods.items()} == {
        "idp": [1], "ino-0.8": [1],
    }  # fmt: skip
    assert ablations.part(study_of(more[0], more[2]), "ino") is None


def test_tails_by_quarter(study):
    panels = ablations.tails(study).get_axes()
    assert [panel.get_title() for panel in panels] == [
        f"after {share}% of the steps" for share in (25, 50, 75, 100)
    ]
    accuracy, strict, worst = (lines[0] for lines in panels[3].containers)
    assert list(accuracy.get_xdata()) == [0.0, 0.2, 0.4, 0.8]
    assert list(accuracy.get_ydata()) == pytest.approx([0.5, 0.475, 0.525, 0.4])
    assert list(strict.get_ydata()) == pytest.approx([0.3, 0.25, 0.35, 0.4])
    assert list(worst.get_ydata()) == pytest.approx([0.2, 0.1, 0.3, 0.4])
    middle = panels[1].containers[0][0]
    assert list(middle.get_ydata()) == pytest.approx([0.175] * 4)  # step 10 of 20


def test_map_of_shapes(study):
    panels = ablations.shapes(study).get_axes()
    assert [panel.get_title() for panel in panels] == [
        "accuracy, % (IDP-SGD 50.0)",
        "strict owners, % (IDP-SGD 30.0)",
        "worst group, % (IDP-SGD 20.0)",
    ]
    texts = {text.get_position(): text.get_text() for text in panels[0].texts}
    assert texts == {(0.5, 0.5): "50.0", (0.5, 1.5): "60.0"}  # beta 2, alpha 0.5 and 2
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["0.5", "2"]


def test_bars_of_orders(study):
    (panel,) = ablations.orders(study).get_axes()
    groups = [found for found in panel.containers if isinstance(found, BarContainer)]
    heights = [[bar.get_height() for bar in bars] for bars in groups]
    assert len(heights) == 3
    assert heights[0] == pytest.approx([0.5, 0.3, 0.2])
    assert heights[1] == pytest.approx([0.525, 0.35, 0.3])


def test_nothing_is_drawn_without_runs():
    plain = study_of(made("idp"), made("ino", tail=0.4))
    assert ablations.tails(plain) is ablations.shapes(plain) is ablations.orders(plain) is None


def test_budgets_of_one_class():
    """Rows are the classes whose budget was changed, columns are all classes."""
    budgets = study_of(
        made("idp"),
        made("class-budget:0=3", (0.5, 0.3, 0.6, 0.8)),
        made("class-budget:3=3", (0.2, 0.4, 0.5, 0.9)),
        made("class-budget:0=1", (0.0, 0.4, 0.6, 0.8)),
        made("class-budget:all=3", (0.9, 0.9, 0.9, 0.9)),
    )
    figure = ablations.class_budgets(budgets)
    lower, higher = figure.get_axes()
    assert (lower.get_title(), higher.get_title()) == ("ε 1 instead of 1", "ε 3 instead of 1")
    assert [text.get_text() for text in lower.texts] == ["-20", "+0", "+0", "+0"]
    assert [text.get_text() for text in higher.texts] == [
        *("+30", "-10", "+0", "+0"),
        *("+0", "+0", "-10", "+10"),
    ]
    assert [label.get_text() for label in higher.get_yticklabels()] == ["a", "d"]
    assert [label.get_text() for label in higher.get_xticklabels()] == ["a", "b", "c", "d"]
    assert "-20.0 points with ε 1, +20.0 points with ε 3" in figure.get_suptitle()


def test_one_class_alone_gives_no_picture_of_budgets():
    assert ablations.class_budgets(study_of(made("idp"), made("class-budget:0=3"))) is None
    without = study_of(made("class-budget:0=3"), made("class-budget:1=3"))
    assert ablations.class_budgets(without) is None
