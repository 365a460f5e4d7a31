"""The search: same effort for all methods, and values chosen on held-out records."""

import json

import pytest

from made_results import result
from ownerwise.wording import Amount
from ownerwise_reproduction import methods, settings, tuning
from ownerwise_reproduction.trials import Trial, run_trial

DIGITS = settings.setting("digits")


def test_draws():
    drawn = tuning.draw(DIGITS, "paper", (), 30)
    assert drawn[0] == {
        "plan.clip_norm": 1.0, "training.lr": 1.0, "plan.steps": 60,
        "weights.tail": 0.4, "weights.kappa": 1.0,
    }  # fmt: skip
    assert drawn == tuning.draw(DIGITS, "paper", (), 30)
    assert drawn[:5] == tuning.draw(DIGITS, "paper", (), 5)  # more trials go on
    assert all(0.25 <= values["plan.clip_norm"] <= 4 for values in drawn)
    assert all(0.25 <= values["training.lr"] <= 4 for values in drawn)
    assert {values["plan.steps"] for values in drawn} == {30, 60, 120}
    assert all(0.05 <= values["weights.tail"] <= 0.6 for values in drawn)


def test_all_methods_get_the_same_draws():
    drawn = tuning.draw(DIGITS, "paper", (), 4)
    wanted = methods.parse("idp,ino,ino-budget")
    trials = tuning.tuning_trials(DIGITS, wanted, drawn, range(2))
    assert len(trials) == 12
    for (method, number), group in trials.items():
        assert [trial.seed for trial in group] == [0, 1]
        config = group[0].config
        assert config["training"]["lr"] == drawn[number]["training.lr"]
        assert config["plan"]["steps"] == drawn[number]["plan.steps"]
        assert config["data"]["validation_share"] == tuning.VALIDATION_SHARE
        expected = {"idp": set(), "ino": {"kind", "tail"}, "ino-budget": {"kind", "tail", "kappa"}}
        assert set(config["weights"]) == expected[method]


def test_test_records_are_not_those_chosen_by(tmp_path):
    (idp,) = methods.parse("idp")
    changes = ("data.validation_share=0.1", "plan.steps=2", 'plan.accountant="rdp"')
    whole = Trial(DIGITS, idp, 0, "paper", changes[1:])
    part = run_trial(Trial(DIGITS, idp, 0, "paper", changes), tmp_path / "part")
    full = run_trial(whole, tmp_path / "whole")

    def records(measured):
        return sum(group["records"] for group in measured["groups"].values())

    assert part["evaluated_on"] == "validation"
    assert full["evaluated_on"] == "test"
    held_out = records(part["validation"])
    assert part["plans"][0]["records"] + held_out == full["plans"][0]["records"]
    assert records(part["final"]) == records(full["final"])
    assert records(part["history"][0]) == held_out


def point(number, accuracy, strict, method="idp"):
    measured = {
        "accuracy": Amount(accuracy, None, 1),
        "balanced_accuracy": Amount(accuracy, None, 1),
        "strict": Amount(strict, None, 1),
        "worst_group": Amount(strict / 2, None, 1),
    }
    return tuning.Point(method, number, {}, measured, measured, 1.0, [])


def test_frontier_and_best():
    found = [point(0, 0.9, 0.1), point(1, 0.8, 0.05), point(2, 0.7, 0.5), point(3, 0.7, 0.4)]
    found += [point(4, 0.2, 0.6), point(0, 0.95, 0.9, "ino")]
    assert [p.number for p in tuning.frontier(found[:5], "strict")] == [0, 2, 4]
    described = tuning.describe(found, 5, [0], "as typed")
    assert described["methods"]["idp"]["frontier"]["worst_group"] == [0, 2, 4]
    assert described["methods"]["idp"]["best"] == {
        "accuracy": 0, "balanced_accuracy": 0, "strict": 4, "worst_group": 4,
    }  # fmt: skip
    assert described["methods"]["ino"]["frontier"]["strict"] == [0]
    assert "NOT PRIVATE" in described["not_private"]
    assert described["command"] == "as typed"


def test_points_and_files(tmp_path):
    drawn = tuning.draw(DIGITS, "paper", (), 2)
    idp, ino = (Trial(DIGITS, method, 0).config.sections for method in methods.parse("idp,ino"))
    other = result(validation=result(recalls=(0.1, 0.1, 0.1, 0.1))["final"], config=ino)
    found = tuning.points(drawn, {("idp", 0): [result(config=idp)], ("ino", 1): [other]})
    assert found[0].validation["accuracy"].mean == pytest.approx(0.5)
    assert found[1].validation["accuracy"].mean == pytest.approx(0.1)
    assert found[1].test["accuracy"].mean == pytest.approx(0.5)
    assert found[1].wall_seconds == 9.0
    assert found[1].plans == ["0123456789abcdef"]
    assert "weights.tail" not in found[0].values
    assert set(found[1].values) == {"plan.clip_norm", "training.lr", "plan.steps", "weights.tail"}
    table, picture = tuning.write("digits", found, 2, [0], "as typed", tmp_path)
    assert json.loads(table.read_text())["trials"] == 2
    assert picture.read_text().startswith("<?xml")
