"""Tables of patients: whole owners are held out, leave the plan, and are said to be unprotected."""

import json
import re

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.config import prepare_run
from ownerwise.config.reading import make_config
from tools import step_tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)


def write(folder, visits, people=150):
    """A table with so many rows per patient, budgets for all of them, and a configuration."""
    chance = np.random.default_rng(0)
    rows = []
    for person in range(people):
        for _ in range(visits):
            age = int(chance.integers(0, 100))
            rows.append(f"P{person:04d},{age},{chance.normal():.3f},{'ny'[age > 50]}\n")
    (folder / "t.csv").write_text("patient,age,score,ill\n" + "".join(rows))
    budgets = [f"P{person:04d},{(2, 4, 8)[person % 3]}\n" for person in range(people)]
    (folder / "b.csv").write_text("owner,epsilon\n" + "".join(budgets))
    return {
        "run": {"evaluate_every": 2},
        "data": {
            "file": "t.csv", "target": "ill", "owner": "patient", "classes": ["n", "y"],
            "features": {"age": [0, 100], "score": [-3, 3]},
        },
        "owners": {"budgets": "b.csv"},
        "plan": {"steps": 4, "batch_size": 20},
        "model": {"name": "mlp", "hidden": []},
        "training": {"lr": 0.5},
    }  # fmt: skip


def changed(config, **sections):
    return {**config, **{name: {**config[name], **keys} for name, keys in sections.items()}}


def prepared(config, folder):
    return prepare_run(make_config(config, folder), folder=folder / "run")


def refused(config, folder):
    with pytest.raises(ow.OwnerwiseError) as caught:
        prepared(config, folder)
    return caught.value.problems


def people_in(records):
    return set() if records is None else set(records.columns["owner"].tolist())


WAYS = {
    "one row, unit record": (1, {}),
    "one row, unit owner": (1, {"plan": {"unit": "owner"}}),
    "one row, record by owner": (1, {"data": {"split_by": "owner"}}),
    "many rows, unit owner": (4, {"plan": {"unit": "owner"}}),
    "many rows, record by owner": (4, {"data": {"split_by": "owner"}}),
    "many rows, validation too": (
        4,
        {"plan": {"unit": "owner"}, "data": {"validation_share": 0.2}},
    ),
    "declared records": (4, {"plan": {"unit": "owner", "sampling": "record"}}),
}


@pytest.mark.parametrize(("visits", "changes"), WAYS.values(), ids=WAYS)
def test_a_table_of_patients_trains_the_first_time(tmp_path, visits, changes):
    """Held-out owners leave the plan by themselves, and the card and report say so first."""
    config = changed(write(tmp_path, visits), **changes)
    if "sampling" in config["plan"]:
        rows = (tmp_path / "b.csv").read_text().splitlines()
        (tmp_path / "b.csv").write_text(
            "\n".join([f"{rows[0]},records", *(f"{r},4" for r in rows[1:])])
        )
    made = prepared(config, tmp_path)
    train, *held = (people_in(part) for part in (made.data.train, made.validation, made.test))
    assert not any(train & part for part in held)
    assert not held[0] & held[1]
    unprotected = len(set.union(*held))
    assert unprotected >= 15
    assert set(made.plan.owners.ids.tolist()) == train
    assert made.plan.records.sum() == len(made.data.train)
    run = made.fit()
    assert run.config["held_out_owners"] == {"unprotected": unprotected, "in_plan": 0}
    sentence = f"UNPROTECTED: {unprotected} owners, whose records are used for validation or"
    run.card(tmp_path / "CARD.md")
    card = (tmp_path / "CARD.md").read_text()
    assert 0 < card.index(f"**{sentence}") < card.index("## Budgets")
    assert card.count(sentence) == 2
    run.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.index('class="banner caution"') < page.index(sentence) < page.index("<dl")


def test_no_single_person_is_in_the_history_or_on_the_console(tmp_path, capsys):
    config = write(tmp_path, visits=12, people=60)  # enough rows for a group of their own
    text = "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in keys.items())
        for section, keys in config.items()
    )
    (tmp_path / "c.toml").write_text(text)
    for unit in ("owner", "record"):
        folder = tmp_path / unit
        command = ["train", str(tmp_path / "c.toml"), "--folder", str(folder)]
        assert main([*command, "--set", f"plan.unit={unit}"]) == 0
        printed = capsys.readouterr()
        history = (folder / "history.jsonl").read_text()
        pages = [(folder / name).read_text() for name in ("CARD.md", "report.html", "config.json")]
        for shown in (printed.out, printed.err, history, *pages):
            assert not re.search(r"\bP00\d\d\b", shown)
        metrics = json.loads(history.splitlines()[-1])["validation"]
        assert set(metrics["groups"]) >= {metrics["worst_group"]["name"]}
        assert all(name.startswith("ε ") for name in metrics["groups"])
        assert metrics["owners"] > 5
        assert f"{metrics['owner_accuracy']:.4f} per owner, worst group ε" in printed.out


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def test_owners_who_are_no_people_may_be_named(tmp_path):
    config = changed(write(tmp_path, visits=200, people=3), owners={"named": True})
    run = prepared(config, tmp_path).fit()
    assert set(run.history[-1]["validation"]["groups"]) == {"P0000", "P0001", "P0002"}
    assert run.config["held_out_owners"] == {"unprotected": 0, "in_plan": 3}


def test_the_unit_decides_how_data_is_split_and_never_the_data(tmp_path):
    config = write(tmp_path, visits=4)
    by_record = prepared(config, tmp_path)
    assert people_in(by_record.data.train) & people_in(by_record.validation)
    stored = by_record.trainer.notes["settings"]["data"]["split_by"]
    assert stored == "record"
    by_owner = prepared(changed(config, plan={"unit": "owner"}), tmp_path)
    assert by_owner.trainer.notes["settings"]["data"]["split_by"] == "owner"


def test_an_owner_who_is_missing_altogether_is_still_a_mistake(tmp_path):
    config = write(tmp_path, visits=1)
    with (tmp_path / "b.csv").open("a") as file:
        file.write("P9999,1\n")
    (problem,) = refused(config, tmp_path)
    assert "owner without records: P9999 has a budget but no records" in problem


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"data": {"split_by": "record"}, "plan": {"unit": "owner"}},
            "data.split_by 'record' with unit 'owner': expected split_by 'owner' (the default)",
        ),
        ({"data": {"split_by": "patient"}}, "data.split_by is 'patient'; expected"),
        (
            {"data": {"split_by": "owner", "scale": "statistics", "validation_share": 0.2}},
            "held-out owners would enter the statistics",
        ),
        ({"data": {"split_by": "owner", "test_share": 1e-9}}, "holds out none of the 150 owners"),
        (
            {"plan": {"unit": "owner"}, "data": {"validation_share": 1 - 1e-9}},
            "the validation share of 1 holds out all of the",
        ),
    ],
)
def test_splits_that_cannot_be_made_are_refused_with_advice(tmp_path, changes, says):
    assert any(
        says in problem for problem in refused(changed(write(tmp_path, 2), **changes), tmp_path)
    )


def test_an_assignment_has_no_owners_to_split_by(tmp_path):
    config = {
        **write(tmp_path, 1),
        "data": {"name": "digits", "split_by": "owner"},
        "owners": {"assignment": {"kind": "by_class", "budgets": list(range(1, 11))}},
    }
    (problem,) = refused(config, tmp_path)
    assert "not to an assignment" in problem


def test_a_resumed_run_keeps_its_unit_its_sampling_and_its_split(tmp_path):
    config = changed(write(tmp_path, 2), plan={"unit": "owner"}, run={"seed": 1})
    prepared(config, tmp_path).fit()

    def resumed(**changes):
        made = make_config(changed(config, **changes), tmp_path)
        again = prepare_run(made, folder=tmp_path / "run", resume=True)
        with pytest.raises(ow.OwnerwiseError) as caught:
            again.fit(resume=True)
        return "\n".join(caught.value.problems)

    assert "settings.plan.unit was 'owner' and is now 'record'" in resumed(plan={"unit": "record"})
    assert "settings.data.split_by was 'owner' and is now 'record'" in resumed(
        plan={"unit": "record"}
    )
    assert "settings.plan.sampling was absent and is now 'record'" in resumed(
        plan={"sampling": "record"}
    )
    same = make_config(changed(config, data={"split_by": "owner"}), tmp_path)
    prepare_run(same, folder=tmp_path / "run", resume=True).fit(resume=True)


def test_more_rows_than_declared_are_refused_and_max_records_drops_them(tmp_path):
    plan = {"unit": "owner", "sampling": "record"}
    config = changed(write(tmp_path, 4), plan=plan)
    rows = (tmp_path / "b.csv").read_text().splitlines()
    (tmp_path / "b.csv").write_text(
        "\n".join(["owner,epsilon,records", *(f"{row},3" for row in rows[1:])]) + "\n"
    )
    with (
        pytest.warns(UserWarning, match="declares 3, has 4"),
        pytest.raises(ow.OwnerwiseError, match=r"more records than declared.*owners\.max_records"),
    ):
        prepared(config, tmp_path).fit()
    run = prepared(changed(config, owners={"max_records": 3}), tmp_path)
    assert np.bincount(run.plan.owners.record_owner_index).tolist() == [3] * len(run.plan.owners)
    assert len(run.data.train) == 3 * len(run.plan.owners)
    assert (run.fit().epsilon() <= run.plan.owners.epsilon).all()


def test_counted_rows_are_bounded(tmp_path):
    config = changed(write(tmp_path, 4), plan={"unit": "owner", "sampling": "record"})
    run = prepared(changed(config, owners={"max_records": 2}), tmp_path)
    assert set(run.plan.records.tolist()) == {2}
    wrong = changed(config, owners={"max_records": 0})
    assert any("owners.max_records" in problem for problem in refused(wrong, tmp_path))
