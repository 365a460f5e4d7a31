"""From a configuration to a run: data, owners, plan, model and trainer fit together."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise import data
from ownerwise.config import (
    prepare_run,
)
from ownerwise.config.build import make_plug
from ownerwise.config.reading import make_config
from ownerwise.mechanisms import ORDERS, WEIGHTS
from tools import step_tools
from tools.orders import Shuffled

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

DIGITS = {
    "run": {"seed": 3, "evaluate_every": 5},
    "data": {"name": "digits", "validation_share": 0.2},
    "owners": {
        "assignment": {
            "kind": "by_classes",
            "classes": {"low": list("01234"), "high": list("56789")},
            "budgets": [1.0, 5.0],
        }
    },
    "plan": {"steps": 10, "batch_size": 100},
    "model": {"name": "linear-head"},
    "training": {"lr": 0.5},
}


def table(folder, records=200):
    """A CSV file of visits to three clinics, and their budgets."""
    chance = np.random.default_rng(0)
    ages = chance.integers(0, 100, records)
    rows = [
        f"{age},{'ab'[age % 2]},{'ill' if age > 50 else 'well'},clinic {number % 3}"
        for number, age in enumerate(ages)
    ]
    (folder / "visits.csv").write_text("age,ward,outcome,clinic\n" + "\n".join(rows) + "\n")
    (folder / "budgets.csv").write_text("owner,epsilon\nclinic 0,strict\nclinic 1,4\nclinic 2,8\n")
    return {
        "run": {"seed": 1},
        "data": {
            "file": "visits.csv",
            "target": "outcome",
            "owner": "clinic",
            "features": {"age": [0, 100], "ward": ["a", "b"]},
            "classes": ["well", "ill"],
        },
        "owners": {"budgets": "budgets.csv", "levels": {"strict": 1.0}},
        "plan": {"method": "scale", "steps": 20, "batch_size": 50},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"lr": 1.0},
    }


def test_a_named_data_set_with_held_out_validation(tmp_path):
    made = prepare_run(make_config(DIGITS), folder=tmp_path)
    assert made.validation is not None
    whole = data.load("digits")
    assert len(made.data.train) + len(made.validation) == len(whole.train)
    spread = (0.2 * 0.8 / len(whole.train)) ** 0.5
    assert len(made.validation) / len(whole.train) == pytest.approx(0.2, abs=4 * spread)
    run = made.fit()
    assert run.config["groups_are"] == "owners"
    assert run.group_budgets == {"low": 1.0, "high": 5.0}
    groups = run.history[-1]["test"]["groups"].values()
    assert sum(group["records"] for group in groups) == len(whole.test)
    assert run.config["settings"]["plan"] == {"steps": 10, "batch_size": 100}
    assert not run.private


def test_without_a_share_the_test_part_is_the_validation_data(tmp_path):
    config = make_config(DIGITS | {"data": {"name": "digits"}})
    made = prepare_run(config, folder=tmp_path)
    assert made.validation is made.data.test
    assert made.test is None


def test_a_table_with_budgets_in_a_file(tmp_path):
    found = table(tmp_path)
    found["owners"]["named"] = True
    run = prepare_run(make_config(found, tmp_path), folder=tmp_path / "run").fit()
    assert run.plan.method == "scale"
    assert run.label == "IDP-SGD (scale)"
    assert run.group_budgets == {"clinic 0": 1.0, "clinic 1": 4.0, "clinic 2": 8.0}
    assert run.config["groups_are"] == "owners"
    assert set(run.history[-1]["validation"]["groups"]) == set(run.group_budgets)
    assert "settings" in run.config


def test_budgets_in_the_configuration_and_a_single_logit(tmp_path):
    found = table(tmp_path)
    found["owners"] = {"epsilon": {"clinic 0": 1, "clinic 1": 4, "clinic 2": 8}, "delta": 1e-6}
    found["training"] |= {"loss": "binary_cross_entropy_with_logits"}
    found["model"] = {"name": "linear-head"}
    made = prepare_run(make_config(found, tmp_path), folder=tmp_path / "run")
    assert made.trainer.model[-1].out_features == 1
    run = made.fit()
    assert set(run.plan.deltas) == {1e-6}
    assert run.history[-1]["validation"]["accuracy"] > 0.5


def shared_visits(folder):
    """The table of visits, every fourth of which belongs to two clinics."""
    found = table(folder)
    header, *rows = (folder / "visits.csv").read_text().splitlines()
    rows[::4] = [row + "|clinic 2" for row in rows[::4]]
    (folder / "visits.csv").write_text("\n".join([header, *rows]) + "\n")
    return found


def test_a_separator_gives_records_several_owners(tmp_path):
    found = shared_visits(tmp_path)
    found["owners"] |= {"separator": "|", "named": True}
    made = prepare_run(make_config(found, base=tmp_path), folder=tmp_path)
    plan = made.trainer.plan
    assert plan.owners.ids.tolist() == ["clinic 0", "clinic 1", "clinic 2"]
    assert plan.owners.shared.sets() == [(0, 2), (1, 2)]
    assert plan.records[2] > plan.records[0]
    assert made.assignment.group_budgets["clinic 1|clinic 2"] == 4.0
    run = made.fit()
    assert run.group_budgets["clinic 1"] == 4.0
    assert run.config["held_out_owners"] == {"unprotected": 0, "in_plan": 3}


def test_cells_are_not_split_without_a_separator(tmp_path):
    found = shared_visits(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match=r"no budget for owner clinic 0\|clinic 2"):
        prepare_run(make_config(found, base=tmp_path), folder=tmp_path)
    found["owners"]["separator"] = " "
    with pytest.raises(ow.OwnerwiseError, match=r"owners\.separator is blank"):
        make_config(found, base=tmp_path)


def test_delta_is_for_owners_whose_table_has_none(tmp_path):
    found = table(tmp_path)
    (tmp_path / "budgets.csv").write_text(
        "owner,epsilon,delta\nclinic 0,strict,1e-7\nclinic 1,4,\nclinic 2,8,1e-8\n"
    )
    found["owners"]["delta"] = 1e-6
    made = prepare_run(make_config(found, tmp_path), folder=tmp_path / "run")
    assert made.plan.deltas.tolist() == [1e-7, 1e-6, 1e-8]


def test_all_problems_of_budgets_and_records_at_once(tmp_path):
    found = table(tmp_path)
    found["owners"] = {"epsilon": {"clinic 0": 0, "clinic 1": 4}}
    with pytest.raises(ow.OwnerwiseError) as caught:
        prepare_run(make_config(found, tmp_path), folder=tmp_path / "run")
    message = str(caught.value)
    assert "epsilon of owner clinic 0 (0)" in message
    assert "no budget for owner clinic 2" in message


def test_advice_names_keys_of_the_configuration(tmp_path):
    found = table(tmp_path)
    found["owners"] = {"epsilon": {"clinic 0": "high", "clinic 1": 4, "clinic 2": 5, "clinic 3": 6}}
    with pytest.raises(ow.OwnerwiseError) as caught:
        prepare_run(make_config(found, tmp_path), folder=tmp_path / "run")
    message = str(caught.value)
    assert "set owners.levels" in message
    assert "without records: clinic 3" in message
    assert "levels={" not in message
    assert "records=" not in message


def test_numbers_as_owner_ids(tmp_path):
    (tmp_path / "t.csv").write_text(
        "x,y,id\n" + "\n".join(f"{n % 7},{n % 2},{n % 3}" for n in range(900)) + "\n"
    )
    found = table(tmp_path) | {
        "data": {"file": "t.csv", "target": "y", "owner": "id", "features": {"x": [0, 7]},
                 "classes": [0, 1]},
        "owners": {"epsilon": {"0": 1.0, "1": 2.0, "2": 3.0}, "named": True},
        "plan": {"steps": 3, "batch_size": 20},
    }  # fmt: skip
    run = prepare_run(make_config(found, tmp_path), folder=tmp_path / "run").fit()
    assert run.group_budgets == {"0": 1.0, "1": 2.0, "2": 3.0}


def test_classes_found_in_the_records_make_the_run_not_private(tmp_path):
    found = table(tmp_path)
    del found["data"]["classes"], found["run"]["seed"]
    with pytest.warns(ow.PrivacyWarning, match="NOT private"):
        run = prepare_run(make_config(found, tmp_path), folder=tmp_path / "run").fit()
    assert run.seed is None
    assert not run.private
    assert "classes" in run.not_private[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "ino"}, ow.INO()),
        ({"kind": "ino", "tail": 0.2, "alpha": 2, "beta": 3}, ow.INO(tail=0.2, alpha=2, beta=3)),
        ({"kind": "ino", "width": 1}, ow.INO(width=1)),
        ({"kind": "ino", "kappa": 1.5}, ow.INO(score_by=ow.BudgetAware(1.5))),
        ({"kind": "ino", "order": "loss"}, ow.INO()),
    ],
)
def test_weights_and_training_options_arrive(tmp_path, options, expected):
    training = {
        "lr": 0.1,
        "optimizer": "adam",
        "options": {"betas": [0.5, 0.9]},
        "clipping": {"kind": "psac", "r": 0.3},
        "micro_batch_size": 7,
    }
    changed = DIGITS | {"weights": options, "training": training}
    trainer = prepare_run(make_config(changed), folder=tmp_path).trainer
    assert trainer.weights == expected
    assert trainer.clipping == ow.Psac(0.3)
    assert trainer.optimizer is torch.optim.Adam
    assert trainer.optimizer_options == {"betas": [0.5, 0.9]}
    assert trainer.performance == ow.Performance(micro_batch_size=7)


def test_importance_sampling_and_noise_schedules_arrive(tmp_path):
    schedule = {"name": "step", "every": 6, "factor": 0.5}
    changed = DIGITS | {
        "plan": {"steps": 10, "batch_size": 100, "release_std": 9.0, "noise_schedule": schedule},
        "training": {"lr": 0.1, "clipping": {"kind": "importance", "acceptance": 0.4}},
    }
    prepared = prepare_run(make_config(changed), folder=tmp_path / "run")
    assert prepared.trainer.clipping == ow.ImportanceSampling(acceptance=0.4)
    assert prepared.plan.schedule.segments == ((6, 1.0), (4, 0.5))
    assert prepared.plan.release_std == 9.0
    run = prepared.fit()
    assert run.config["clipping"]["acceptance"] == 0.4
    assert (run.epsilon() <= prepared.plan.targets).all()


def test_a_random_order_follows_the_seed(monkeypatch):
    monkeypatch.setitem(ORDERS._own, "shuffled", Shuffled)
    asked = {"kind": "ino", "order": "shuffled"}
    first, again, other = (
        make_plug(WEIGHTS, asked, seed).score_by(np.zeros(5), np.zeros(5, int), None)
        for seed in (3, 3, 4)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_weights_and_split_are_repeatable_and_leave_the_global_seed_alone(tmp_path):
    state = torch.random.get_rng_state()
    one, other = (prepare_run(make_config(DIGITS), folder=tmp_path) for _ in range(2))
    assert torch.equal(one.trainer.model[-1].weight, other.trainer.model[-1].weight)
    assert np.array_equal(one.validation.inputs, other.validation.inputs), "the split is public"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_resumed_run_keeps_its_plan_and_lists_what_changed(tmp_path):
    first = prepare_run(make_config(DIGITS), folder=tmp_path)
    first.fit()
    again = prepare_run(make_config(DIGITS), folder=tmp_path, resume=True)
    assert again.plan.hash == first.plan.hash
    assert again.fit(resume=True).steps_spent == 10
    budgets = DIGITS["owners"]["assignment"] | {"budgets": [2.0, 5.0]}
    other = DIGITS | {"owners": {"assignment": budgets}, "plan": {"steps": 9, "batch_size": 100}}
    with pytest.raises(ow.OwnerwiseError) as caught:
        prepare_run(make_config(other), folder=tmp_path, resume=True).fit(resume=True)
    message = str(caught.value)
    assert "settings.plan.steps was 10 and is now 9" in message
    assert "group_budgets.low was 1.0 and is now 2.0" in message
    assert "plan: schedule was" in message


OLD_SETTINGS = Path(__file__).parents[1] / "files" / "run-before-prediction" / "config.json"


@pytest.fixture
def before_prediction(tmp_path):
    """A run whose config.json was written by a version without the setting "prediction"."""
    content = table(tmp_path)
    prepare_run(make_config(content, tmp_path), folder=tmp_path / "run").fit()
    path = tmp_path / "run" / "config.json"
    written, old = json.loads(path.read_text()), json.loads(OLD_SETTINGS.read_text())
    assert "prediction" in written
    assert "prediction" not in old
    path.write_text(json.dumps(old | {"run_id": written["run_id"]}))
    return content, tmp_path


def resumed(content, folder):
    return prepare_run(make_config(content, folder), folder=folder / "run", resume=True).fit(True)


def test_a_run_of_a_version_without_a_setting_is_resumed_and_gets_it(before_prediction):
    content, folder = before_prediction
    resumed(content, folder)
    run = ow.Run.load(folder / "run")
    assert run.classes == ["well", "ill"]
    assert set(run.predict(folder / "visits.csv")) <= {"well", "ill"}


def test_a_key_that_is_now_written_out_may_only_have_the_value_it_stood_for(before_prediction):
    content, folder = before_prediction
    plan = content["plan"] | {"strict": False, "clip_norm": 1.0, "accountant": "pld"}
    same = {"plan": plan, "data": content["data"] | {"test_share": 0.2, "scale": "ranges"}}
    resumed(content | same, folder)
    other = {
        "plan": content["plan"] | {"strict": True},
        "training": content["training"] | {"averaging": 0.9},
    }
    with pytest.raises(ow.OwnerwiseError) as caught:
        resumed(content | other, folder)
    assert len(caught.value.problems) == 2
    assert "averaging was absent and is now 0.9" in str(caught.value)
    assert "settings.plan.strict was False and is now True" in str(caught.value)


def test_a_setting_that_both_versions_know_must_still_agree(before_prediction):
    content, folder = before_prediction
    resumed(content, folder)
    path = folder / "run" / "config.json"
    stored = json.loads(path.read_text())
    stored["prediction"]["classes"] = ["ill", "well"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ow.OwnerwiseError, match=r"prediction\.classes was"):
        resumed(content, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"name": "mlp", "hidden": "wide"}}, "hidden='wide': expected a list of sizes"),
        ({"model": {"name": "mlp", "activation": "rely"}}, "rely"),
        ({"owners": {"epsilon": {"a": 1.0}, "column": "sex"}}, "digits has the columns none"),
        ({"data": {"name": "digits", "validation_share": 1e-4}}, "holds out none of"),
        ({"data": {"name": "digits", "only": ["11"]}}, "no class '11'"),
        ({"plan": {"steps": 10, "batch_size": 1e6}}, "batch_size 1e"),
    ],
)
def test_what_the_data_does_not_allow_is_explained(tmp_path, change, message):
    with pytest.raises(ow.OwnerwiseError, match=message):
        prepare_run(make_config(DIGITS | change), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_problems_of_model_and_owners_come_together(tmp_path):
    change = {
        "model": {"name": "mlp", "hidden": "wide"},
        "owners": {"assignment": {"kind": "by_class", "budgets": [1.0]}},
    }
    with pytest.raises(ow.OwnerwiseError, match="2 problems") as caught:
        prepare_run(make_config(DIGITS | change), folder=tmp_path)
    assert "1 budgets for 10" in str(caught.value)


def test_other_numbers_of_records_than_declared_are_named(tmp_path):
    content = table(tmp_path)
    rows = "owner,epsilon,records\nclinic 0,1,70\nclinic 1,4,53\nclinic 2,8,53\n"
    (tmp_path / "budgets.csv").write_text(rows)
    with pytest.warns(UserWarning, match=r"not private\): clinic 0 declares 70, has \d+") as found:
        prepare_run(make_config(content, base=tmp_path), folder=tmp_path / "run")
    assert "% of the planned size" in str(found[0].message)
