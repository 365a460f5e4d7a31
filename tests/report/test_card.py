import io
import re
from contextlib import redirect_stdout

import numpy as np
import pytest
import yaml

import ownerwise as ow
from ownerwise.report import card_text, write_card
from tools.report_tools import evaluation, made_run, small_plan, wide_plan


def head_of(card: str) -> dict:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def snippet_of(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


def cell(card: str, name: str) -> str:
    """The second cell of the row that begins with `name`."""
    return re.search(rf"^\| {re.escape(name)} \| (.*?) \|", card, re.MULTILINE)[1]


def test_the_head_is_what_model_hubs_read():
    run = made_run("INO-SGD", seed=None)
    head = head_of(card_text(run))
    assert head["library_name"] == "ownerwise"
    assert "differential-privacy" in head["tags"]
    assert "license" not in head
    (entry,) = head["model-index"]
    (result,) = entry["results"]
    assert set(result) == {"task", "dataset", "metrics"}
    assert result["task"]["type"]
    assert result["dataset"]["name"] == "synthetic digits"
    assert result["dataset"]["type"] == "synthetic-digits"
    values = {metric["name"]: metric["value"] for metric in result["metrics"]}
    last = run.history[-1]["validation"]
    assert values["Accuracy (validation, not private)"] == pytest.approx(last["accuracy"], abs=1e-4)
    assert all("not private" in name for name in values)


def test_without_validation_there_are_no_metrics():
    card = card_text(made_run(seed=None, with_validation=False))
    assert "model-index" not in head_of(card)
    assert "it is unknown how well the model works, and for whom" in card


def test_test_data_are_named_as_such():
    run = made_run(seed=None)
    run.history[-1]["test"] = evaluation({"a": 0.5, "b": 0.7}, {"a": 1.0, "b": 1.0})
    (result,) = head_of(card_text(run))["model-index"][0]["results"]
    assert result["dataset"]["split"] == "test"
    assert result["metrics"][1]["value"] == pytest.approx(0.6)


def test_everything_that_decides_the_guarantee_is_there():
    run = made_run("INO-SGD", seed=None, steps_spent=150)
    card = card_text(run)
    plan = run.plan
    rows = [line.split(" | ") for line in card.splitlines() if line.endswith("in 100 |")]
    assert [row[0] for row in rows] == ["| 0.5", "| 2", "| 8"]
    spent = [float(row[1]) for row in rows]
    np.testing.assert_allclose(spent, np.sort(plan.epsilon(steps=150)), rtol=1e-3)
    assert "1e-5" in rows[0][2]
    assert cell(card, "Steps planned") == "200"
    assert cell(card, "Steps spent") == "150 (model updates: 150)"
    assert f"{plan.noise_std:.6g}" in cell(card, "Noise")
    assert "Poisson" in cell(card, "Sampling")
    assert cell(card, "Clip norm") == "1"
    assert cell(card, "Clipping rule") == "Standard"
    assert "INO" in cell(card, "Importance weights")
    assert "dp-accounting" in cell(card, "Verified by")
    assert "AES-256" in cell(card, "Randomness")
    assert plan.hash in card
    for words in (
        "ONE RECORD, not one owner",
        "adding one record to one of them yields the other",
        "the table of budgets",
        "the declared number of records",
        "hyper-parameter search",
        "NOT covered by any guarantee",
        "the model after 150 updates",
    ):
        assert words in card
    assert "NOT PRIVATE" not in card


def test_a_release_is_listed():
    card = card_text(made_run(seed=None, plan=small_plan(release_std=4.0, steps=20)))
    assert "noise of std 4" in card.split("## Released")[1].split("##")[0]


def test_fixed_seeds_have_a_banner():
    card = card_text(made_run(seed=7))
    assert "> # NOT PRIVATE" in card
    assert "a fixed seed (7)" in card
    assert "not-private" in head_of(card)["tags"]
    assert "**Private" not in card
    assert "NOT PRIVATE" in cell(card, "Randomness")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 200),
        ({}, 130),
        ({"accountant": "rdp"}, 200),
        ({"method": "scale", "noise_schedule": ((100, 2.0), (100, 1.0))}, 150),
        ({"release_std": 4.0, "steps": 20}, 20),
        ({"unit": "owner", "batch_size": 1}, 200),
        ({"unit": "owner", "sampling": "record", "steps": 20}, 20),
    ],
)
def test_the_snippet_runs_and_agrees(options, steps):
    """Sampling rate, noise multiplier and steps alone give the same epsilon elsewhere."""
    plan = small_plan(**options)
    code = snippet_of(card_text(made_run(seed=None, plan=plan, steps_spent=steps)))
    assert "ownerwise" not in code
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})  # the card's own code
    assert float(printed.getvalue()) == pytest.approx(plan.epsilon(steps=steps).min(), rel=0.01)


@pytest.mark.parametrize(("accountant", "loose"), [("pld", 0.01), ("rdp", 0.2)])
def test_the_snippet_counts_all_records_of_the_owner(accountant, loose):
    owners = ow.Owners(None, {"ann": 1.0, "ben": 4.0}, 1e-5, records={"ann": 5, "ben": 3})
    plan = ow.plan(
        owners, unit="owner", sampling="record", steps=20, batch_size=2, accountant=accountant
    )
    code = snippet_of(card_text(made_run(seed=None, plan=plan, steps_spent=20)))
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})  # the card's own code
    found, stated = float(printed.getvalue()), plan.epsilon().min()
    assert (1 - loose) * stated < found < 1.005 * stated


def test_a_run_without_steps_has_spent_nothing():
    card = card_text(made_run(seed=None, steps_spent=0, evaluations=1))
    assert "No steps were taken" in card
    assert "| 0.5 | 0 |" in card


def test_many_owners_are_shown_as_ranges():
    card = card_text(made_run(plan=wide_plan()))
    assert len(re.findall(r"^\| [\d.]+ to [\d.]+ \|", card, re.MULTILINE)) == 8


def test_names_cannot_break_out():
    hostile = 'x"\n---\nlicense: mit | <script>`*_[a](b)\x07'
    run = made_run(label=hostile, seed=None, name=hostile, data=hostile, model=hostile)
    card = card_text(run)
    head = head_of(card)
    assert "license" not in head
    assert head["model-index"][0]["name"].startswith('x" --- license: mit')
    body = card.split("---\n", 2)[2]
    assert "<script>" not in body
    assert "\n---\n" not in body
    assert r"\| &lt;script>".replace(">", r"\>") in body


def test_the_card_is_written_whole_and_is_the_same_each_time(tmp_path):
    run = made_run(seed=None)
    write_card(run, tmp_path / "a.md")
    run.card(tmp_path / "b.md")
    assert (tmp_path / "a.md").read_bytes() == (tmp_path / "b.md").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "b.md"]


def test_data_that_a_dictionary_describes_are_named():
    run = made_run(seed=None, data={"name": "wards", "rows": 3})
    assert head_of(card_text(run))["model-index"][0]["results"][0]["dataset"]["name"] == "wards"


def test_a_delta_that_permits_publishing_a_record_is_told():
    with pytest.warns(ow.PrivacyWarning):
        owners = ow.Owners(np.arange(100) % 2, {0: 1.0, 1: 2.0}, 0.5)
    run = made_run(seed=None, plan=ow.plan(owners, "sample", steps=20, batch_size=20))
    assert "CAUTION: δ is up to 0.5, more than 1/100" in card_text(run)
    assert "CAUTION" not in card_text(made_run(seed=None))
