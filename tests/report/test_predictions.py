"""The section on the quality of predictions, its tiles, and what the card says about it."""

import numpy as np
import pytest

from ownerwise.evaluation import classification
from ownerwise.report import card_text, predictions
from ownerwise.report.blocks import Details, Findings, Table, Tiles
from ownerwise.report.comparison import Comparison
from ownerwise.report.overview import overview
from tools.report_tools import made_run

CLASSES = {"classes": ["home", "admitted"], "columns": ["age"], "sizes": {"inputs": 1}}


def measured(label="IDP-SGD", *, seed=0, classes=2, skill=2.0, common=0.5, owners=False, **config):
    """A run whose last evaluation has the details of made-up predictions."""
    rng = np.random.default_rng(seed)
    run = made_run(label, seed=seed, **config)
    shares = [1 - common, common] if classes == 2 else [1 / classes] * classes
    actual = rng.choice(classes, 300, p=shares)
    logits = rng.normal(size=(300, classes)) + skill * np.eye(classes)[actual]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predicted = probabilities.argmax(axis=1)
    people = np.repeat(np.arange(60), 5) if owners else None
    last = run.history[-1]["validation"]
    last["classification"] = classification(predicted, actual, probabilities, people)
    if owners:
        last["owners"] = 60
    for at, group in enumerate(last["groups"].values()):
        part = slice(100 * at, 100 * (at + 1))
        group["classification"] = classification(
            predicted[part], actual[part], probabilities[part], overall=False
        )
    return run


def built(runs):
    """The blocks of the section."""
    blocks = predictions.SECTION.build(Comparison.of(runs))
    assert blocks is not None
    return blocks


def cells_of(found, key):
    one = found[key]
    if key == "auc":
        return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
    return f"{100 * one['value']:.1f}% ({100 * one['low']:.1f} to {100 * one['high']:.1f})"


def test_two_classes_are_called_by_their_names():
    run = measured(prediction=CLASSES)
    found = run.history[-1]["validation"]["classification"]
    text, table, note, figure, details = built([run])
    keys = ["accuracy", "sensitivity", "specificity", "auc", "calibration_error"]
    assert [row[1] for row in table.rows] == [cells_of(found, key) for key in keys]
    assert table.rows[1][0] == "Sensitivity (recall of “admitted”)"
    assert table.rows[2][0] == "Specificity (recall of “home”)"
    assert "no guarantee covers them" in table.caption
    name = CLASSES["classes"][int(found["majority"]["class"])]
    assert text.words.startswith(f"Always answering “{name}”, the most frequent class")
    assert "They treat records as independent" in note.words
    assert "the probability of “admitted”" in figure.caption
    assert "not private" in figure.caption
    (points,) = [t for t in figure.panels[0].views[""].traces if t["mode"] == "lines+markers"]
    assert len(points["x"]) == len(found["reliability"]) == 10
    assert isinstance(details, Details)
    assert [row[0] for row in details.content.rows] == ["clinic", "cohort", "volunteers"]
    assert "at least 10 records" in details.content.caption
    tiles = next(block for block in overview(Comparison.of([run])) if isinstance(block, Tiles))
    assert tiles.tiles[-1].value == f"{found['auc']['value']:.3f}"


def test_many_classes_have_neither_sensitivity_nor_a_tile_for_the_auc():
    names = ["calm", "odd", "ill", "dire"]
    run = measured(classes=4, prediction={**CLASSES, "classes": names})
    blocks = built([run])
    table = next(block for block in blocks if isinstance(block, Table))
    recalls = [f"Recall of “{name}”" for name in names]
    assert [row[0] for row in table.rows] == ["Accuracy", "AUC", "Calibration error", *recalls]
    found = run.history[-1]["validation"]["classification"]["recalls"]
    assert [row[1] for row in table.rows[3:]] == [cells_of(found, key) for key in "0123"]
    assert f"| Recall of “dire” | {cells_of(found, '3')} |" in card_text(run)
    tiles = next(block for block in overview(Comparison.of([run])) if isinstance(block, Tiles))
    assert not any("ROC" in tile.name for tile in tiles.tiles)
    assert "the probability of the predicted class" in blocks[3].caption


def test_recalls_of_very_many_classes_are_shown_on_request_and_not_twice():
    run = measured(classes=7)
    folded = [block for block in built([run]) if isinstance(block, Details)]
    assert len(folded[0].content.rows) == 7
    assert "Recall of “" not in card_text(run)
    by_class = measured(classes=7, groups_are="classes")
    assert len([block for block in built([by_class]) if isinstance(block, Details)]) == 1


@pytest.mark.parametrize(("classes", "name"), [(2, "admitted"), (3, "ill")])
def test_a_class_that_is_never_recognised_is_named_at_the_top(classes, name):
    """However high the accuracy and the AUC are. Not if one of two runs recognises it."""
    names = ["home", "admitted", "ill"][:classes]
    rng = np.random.default_rng(0)
    actual = rng.choice(classes, 300, p=[0.8, 0.2] if classes == 2 else [0.6, 0.2, 0.2])
    runs = [measured(classes=classes, seed=s, prediction={**CLASSES, "classes": names})
            for s in (0, 1)]  # fmt: skip
    blind = np.where(actual == classes - 1, 0, actual)
    for run, predicted in zip(runs, (blind, actual), strict=True):
        scores = np.eye(classes)[actual] + 0.1
        run.history[-1]["validation"]["classification"] = classification(predicted, actual, scores)
    words = f"IDP-SGD recognises no record of “{name}”."
    for shown, said in (([runs[0]], True), ([runs[1]], False), (runs, False)):
        blocks = overview(Comparison.of(shown))
        cautions = [text for b in blocks if isinstance(b, Findings) for _, text in b.items]
        assert (words in cautions) == said
    assert words in card_text(runs[0])


def test_runs_of_a_method_are_averaged_with_their_intervals():
    runs = [measured(seed=seed) for seed in range(3)] + [measured("INO-SGD", seed=5)]
    found = [run.history[-1]["validation"]["classification"]["auc"] for run in runs[:3]]
    table = built(runs)[1]
    value, low, high = (np.mean([one[key] for one in found]) for key in ("value", "low", "high"))
    assert {row[0]: row[1] for row in table.rows}["AUC"] == (
        f"{value:.3f} ({low:.3f} to {high:.3f})"
    )
    assert "mean over runs" in table.caption


@pytest.mark.parametrize(("skill", "better"), [(4.0, True), (0.0, False)])
def test_a_model_that_is_no_better_than_the_majority_is_called_so_at_the_top(skill, better):
    run = measured(skill=skill, common=0.8, prediction=CLASSES)
    blocks = overview(Comparison.of([run]))
    cautions = [item for b in blocks if isinstance(b, Findings) for item in b.items]
    words = built([run])[0].words
    if better:
        assert not cautions
        assert "Better than that: IDP-SGD by +" in words
    else:
        ((title, caution),) = cautions
        assert title == "Caution"
        assert "not clearly better than always answering “admitted”" in caution
        assert caution == words  # the section says the same
    card = card_text(run)
    assert words.split(":")[0].split("“")[0] in card


def test_intervals_that_allow_for_owners_say_so():
    note = built([measured(owners=True)])[2]
    assert "allow for records of the same owner being alike" in note.words


def test_runs_without_details_have_no_section():
    assert predictions.SECTION.build(Comparison.of([made_run()])) is None
    assert predictions.SECTION.build(Comparison.of([made_run(with_validation=False)])) is None
    assert "95% interval" not in card_text(made_run())


def test_the_card_has_the_numbers_with_their_intervals():
    run = measured()
    found = run.history[-1]["validation"]["classification"]
    card = card_text(run).replace("\\", "")
    for key in ("accuracy", "auc", "calibration_error"):
        assert cells_of(found, key) in card
