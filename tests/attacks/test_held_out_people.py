"""People around a run: who leaves the plan, who is held out, and whose names are written down.

The attacks: remove one record and see whether the plan changes; hide an owner of the plan among the
held-out records by writing their id in another way; search the run's files for names.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

import ownerwise as ow
from ownerwise.config.build import prepare_run
from ownerwise.config.reading import make_config
from ownerwise.estimators import PrivateClassifier
from ownerwise.planning.storage import content_hash
from ownerwise.report import write_report

EPSILON = {"ann": 1.0, "bob": 2.0, "cem": 4.0}
PEOPLE = [f"person{number:02d}" for number in range(9)]


def table(folder, rows, **settings):
    """A configuration for a table with one row per entry of `rows`, all of them different."""
    draw = np.random.default_rng(0).normal(size=(len(rows), 2)).round(4)
    values = zip(rows, draw, strict=True)
    lines = [f"{who},{x},{z},{'no' if x < 0 else 'yes'}" for who, (x, z) in values]
    (folder / "t.csv").write_text("\n".join(["who,x,z,y", *lines]) + "\n")
    return {
        "data": {
            "file": "t.csv", "target": "y", "classes": ["no", "yes"], "owner": "who",
            "features": {"x": [-4, 4], "z": [-4, 4]}, "test_share": 0.4,
        },
        "plan": {"steps": 3, "batch_size": 20},
        "model": {"name": "mlp", "hidden": []},
        "training": {"lr": 0.5},
        **settings,
    }  # fmt: skip


def test_an_owner_whose_last_record_is_removed_stays_in_a_declared_plan():
    """Otherwise, rates and noise of all others would show that the record was there."""
    declared = {"ann": 5, "bob": 5, "cem": 5}
    rows = ["ann", *["bob"] * 5, *["cem"] * 5]

    def planned(record_owner):
        owners = ow.Owners(record_owner, EPSILON, records=declared, held_out=["ann", "bob"])
        return ow.plan(owners, steps=10, batch_size=5)

    assert planned(rows).hash == planned(rows[1:]).hash
    none = ow.Owners(rows[1:], EPSILON, records={**declared, "ann": 0}, held_out=["ann"])
    assert none.left_out == {"ann": 1.0}  # who declares none has none to protect
    with pytest.raises(ow.BudgetError, match="split_by is 'table'"):
        ow.Owners(rows, EPSILON, split_by="table")


@pytest.mark.filterwarnings("ignore:the number of training records differs")
def test_no_row_of_a_table_decides_who_is_in_a_declared_plan(tmp_path):
    rows = ["ann"] * 4 + ["bob"] * 40 + ["cem"] * 40
    (tmp_path / "b.csv").write_text("owner,epsilon,records\nann,1,4\nbob,2,40\ncem,4,40\n")
    found = table(tmp_path, rows, owners={"budgets": "b.csv"})
    lines = (tmp_path / "t.csv").read_text().splitlines()

    def prepared():
        return prepare_run(make_config(found, tmp_path), folder=tmp_path / "run", progress=False)

    whole = prepared()
    trained = (whole.data.train.columns["owner"] == "ann").sum()
    assert 0 < trained < 4
    hashes = {whole.plan.hash}
    for most in range(1, 16):  # without each combination of ann's rows
        kept = [line for at, line in enumerate(lines[1:]) if at >= 4 or not most & 1 << at]
        (tmp_path / "t.csv").write_text("\n".join([lines[0], *kept]) + "\n")
        hashes.add(prepared().plan.hash)
    assert len(hashes) == 1


@pytest.mark.parametrize("given", [["2", "9"], [2.0, 9.0], [(2, 9), (9,)], [("2", "9"), "9"]])
def test_an_owner_of_the_plan_cannot_hide_among_the_held_out(given):
    owners = ow.Owners([1, 1, 2, 2, 3, 3] * 4, {1: 1.0, 2: 2.0, 3: 4.0}, 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=2, unit="owner")
    trainer = ow.Trainer(nn.Linear(2, 2), plan, lr=0.1, progress=False)
    data = torch.zeros(24, 2), torch.arange(24) % 2
    held_out = torch.zeros(2, 2), torch.arange(2)
    with pytest.raises(ow.OwnerwiseError, match=r"validation: owner 2.* is also in the plan"):
        trainer.fit(data, validation=held_out, validation_owners=given)


def test_held_out_owners_of_shared_records_are_counted_one_by_one():
    owners = ow.Owners([("ann", "bob"), "ann", "bob", "cem"] * 6, EPSILON, 1e-5)
    plan = ow.plan(owners, steps=2, batch_size=4)
    trainer = ow.Trainer(nn.Linear(2, 2), plan, lr=0.1, progress=False)
    data = torch.zeros(24, 2), torch.arange(24) % 2
    held_out = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    given = [("ann", "zoltan"), ("zoltan", "yvonne"), "yvonne"]
    with pytest.raises(ow.OwnerwiseError, match="one owner per record"):
        trainer.fit(data, validation=held_out, validation_owners=given[:2])
    run = trainer.fit(data, validation=held_out, validation_owners=given)
    assert run.config["held_out_owners"] == {"unprotected": 2, "in_plan": 1}
    assert "owners" not in run.history[-1]["validation"]
    assert not any(name in json.dumps([run.config, run.history]) for name in ("zoltan", "yvonne"))


@pytest.mark.parametrize("shared", [False, True], ids=["one owner", "several owners"])
@pytest.mark.parametrize("listed", [False, True], ids=["file", "configuration"])
def test_no_person_is_named_in_what_a_run_shows(shared, listed, tmp_path):
    draw = np.random.default_rng(1)
    rows = draw.choice(PEOPLE[:-1], 200).tolist()
    if shared:
        rows[::4] = [f"{who};{draw.choice(PEOPLE)}" for who in rows[::4]]
    epsilon = {who: 1.0 + number % 3 for number, who in enumerate(PEOPLE[: None if shared else -1])}
    lines = [f"{who},{value}" for who, value in epsilon.items()]
    (tmp_path / "b.csv").write_text("\n".join(["owner,epsilon", *lines]) + "\n")
    owners = {"epsilon": epsilon} if listed else {"budgets": "b.csv"}
    owners |= {"separator": ";"} if shared else {}
    config = make_config(table(tmp_path, rows, owners=owners), tmp_path)
    run = prepare_run(config, folder=tmp_path / "run", progress=False).fit()
    assert run.config["held_out_owners"]["in_plan"] == len(epsilon)
    write_report([run], tmp_path / "page.html")
    run.card(tmp_path / "card.md")
    shown = [tmp_path / "page.html", tmp_path / "card.md", tmp_path / "run" / "history.jsonl"]
    shown += [] if listed else [tmp_path / "run" / "config.json"]  # it keeps the given settings
    for path in shown:
        assert not [who for who in PEOPLE if who in path.read_text()], path.name
    assert not [name for name in run.group_budgets if "person" in name]


def test_named_sets_are_those_of_evaluated_records_only(tmp_path):
    """Who shares training records with whom is not for the run's settings."""
    rows = ["ann", "bob", "cem"] * 30 + ["ann;bob"] * 20 + ["bob; cem"]
    owners = {"epsilon": EPSILON, "separator": ";", "named": True}
    config = make_config(table(tmp_path, rows, owners=owners), tmp_path)
    made = prepare_run(config, folder=tmp_path / "run", progress=False)
    assert "bob; cem" not in made.validation.columns["owner"]
    assert made.assignment.group_budgets == {**EPSILON, "ann;bob": 1.0}
    made.fit()
    assert "bob; cem" not in (tmp_path / "run" / "config.json").read_text()


def test_an_estimator_holds_out_records_with_several_owners():
    draw = np.random.default_rng(0)
    inputs, owners = draw.normal(size=(200, 2)), [("ann", "bob"), "ann", "bob", "cem"] * 50
    options = {"steps": 2, "classes": [0, 1], "hidden": (), "validation_fraction": 0.3}
    targets = (inputs[:, 0] > 0).astype(int)
    fitted = PrivateClassifier(EPSILON, **options).fit(inputs, targets, owners=owners)
    assert 30 < fitted.run_.config["validation_records"] < 90
    assert fitted.run_.config["held_out_owners"] == {"unprotected": 0, "in_plan": 3}
    whole = PrivateClassifier(EPSILON, split_by="owner", **options)
    with pytest.raises(ow.OwnerwiseError, match="some records have several owners"):
        whole.fit(inputs, targets, owners=owners)


def test_stored_sets_are_whole_numbers(tmp_path):
    """Half a record would be dropped on loading, and the plan would not be the one on disk."""
    owners = ow.Owners([("ann", "bob"), "ann", "bob", "cem"] * 6, EPSILON, 1e-5)
    ow.plan(owners, steps=2, batch_size=4).save(tmp_path / "plan.json")
    arrays = load_file(tmp_path / "plan.safetensors")
    arrays["shared_records"] = arrays["shared_records"] + 0.5
    save_file(arrays, tmp_path / "plan.safetensors")
    stored = json.loads((tmp_path / "plan.json").read_text())
    header = {key: value for key, value in stored.items() if key not in ("hash", "arrays")}
    stored["hash"] = content_hash(header, arrays)
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(ow.PlanError, match="corrupted"):
        ow.Plan.load(tmp_path / "plan.json")
