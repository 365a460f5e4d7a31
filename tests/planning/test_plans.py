import dataclasses
import json
import pickle

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.accounting import reference
from ownerwise.planning import storage as plan_files


@pytest.fixture(scope="module")
def owners():
    ids = np.repeat(["ada", "ben", "cy", "di"], [400, 300, 200, 100])
    return ow.Owners(ids, {"ada": 0.5, "ben": 1.0, "cy": 2.0, "di": 4.0}, 1e-5)


@pytest.fixture(scope="module")
def plan(owners):
    return ow.plan(owners, method="sample", steps=200, batch_size=50, clip_norm=0.8)


def test_the_contract_of_names(plan, owners):
    assert plan.owners is owners
    assert plan.steps == 200
    assert plan.expected_batch_size == 50
    for name in ("sampling_rates", "clip_norms", "noise_multipliers"):
        assert getattr(plan, name).shape == (4,)
    np.testing.assert_allclose(plan.noise_multipliers, plan.noise_std / plan.clip_norms)
    assert plan.epsilon().shape == (4,)
    assert (plan.epsilon(steps=10) < plan.epsilon()).all()
    assert (plan.epsilon(steps=0) == 0).all()
    with pytest.raises(ValueError, match="steps=201: expected 0 to 200"):
        plan.epsilon(steps=201)


def test_epsilon_grows_with_steps_up_to_the_target(plan):
    """Pitfalls 13 and 14: every step costs, and all budgets are used up together at the end."""
    spent = np.array([plan.epsilon(steps=k) for k in (1, 20, 100, 150, 200)])
    assert (np.diff(spent, axis=0) > 0).all()
    assert ((spent[-1] > 0.995 * plan.targets) & (spent[-1] <= plan.targets)).all()


def test_reading_epsilon_changes_nothing(plan):
    """Pitfall 13: reading epsilon must not change state."""
    before = plan.hash, plan.epsilon(steps=50).tolist()
    plan.epsilon()
    assert (plan.hash, plan.epsilon(steps=50).tolist()) == before


def test_plans_are_frozen(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.noise_std = 0.0
    with pytest.raises(ValueError, match="read-only"):
        plan.sampling_rates[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        plan.epsilon()[0] = 0.0


def test_json_round_trip(plan, owners, tmp_path):
    """Pitfall 16: what is stored is the whole plan; the same epsilon before and after."""
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json", owners=owners)
    assert again == plan
    assert again.hash == plan.hash
    assert hash(again) == hash(plan)
    np.testing.assert_array_equal(again.epsilon(), plan.epsilon())
    np.testing.assert_array_equal(again.epsilon(steps=7), plan.epsilon(steps=7))
    assert again.owners is owners
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "plan.safetensors"]
    assert (tmp_path / "plan.json").stat().st_size < 1000
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_can_be_read_without_its_owners(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = ow.Plan.load(tmp_path / "plan.json")
    assert again.owners is None
    assert again == plan
    assert "ada" not in again.describe(owners=True)


def test_no_owner_id_is_stored(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    for path in tmp_path.iterdir():
        assert b"ada" not in path.read_bytes()


@pytest.mark.parametrize("name", ["noise_std", "clip_norm", "expected_batch_size", "schedule"])
def test_a_changed_header_is_refused(plan, tmp_path, name):
    path = tmp_path / "plan.json"
    plan.save(path)
    stored = json.loads(path.read_text())
    stored[name] = [[100, 1.0]] if name == "schedule" else stored[name] * 0.99
    path.write_text(json.dumps(stored))
    with pytest.raises(ow.PlanError, match="content hash differs"):
        ow.Plan.load(path)


def test_changed_arrays_are_refused(plan, owners, tmp_path):
    plan.save(tmp_path / "plan.json")
    other = ow.plan(owners, steps=200, batch_size=49)
    other.save(tmp_path / "other.json")
    (tmp_path / "other.safetensors").replace(tmp_path / "plan.safetensors")
    with pytest.raises(ow.PlanError, match="content hash differs"):
        ow.Plan.load(tmp_path / "plan.json")


def test_damaged_and_missing_files_are_told_apart(plan, tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(ow.PlanError, match="no plan at"):
        ow.Plan.load(path)
    plan.save(path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(ow.PlanError, match="is not a plan"):
        ow.Plan.load(path)
    path.write_text(whole.replace('"format": 1', '"format": 99'))
    with pytest.raises(ow.PlanError, match="plan format 99"):
        ow.Plan.load(path)
    path.write_text(whole)
    columns = tmp_path / "plan.safetensors"
    columns.write_bytes(columns.read_bytes()[:-20])
    with pytest.raises(ow.PlanError, match="missing or corrupted"):
        ow.Plan.load(path)
    columns.unlink()
    with pytest.raises(ow.PlanError, match="missing or corrupted"):
        ow.Plan.load(path)


def test_other_owners_or_budgets_are_refused(plan, owners, tmp_path):
    plan.save(tmp_path / "plan.json")
    ids = np.repeat(["ada", "ben", "cy", "di"], [400, 300, 200, 101])
    other = ow.Owners(ids, {"ada": 0.5, "ben": 1.0, "cy": 2.0, "di": 4.0}, 1e-5)
    with pytest.raises(ow.PlanError, match="made for different owners"):
        ow.Plan.load(tmp_path / "plan.json", owners=other)
    stricter = ow.Owners(ids[:-1], {"ada": 0.4, "ben": 1.0, "cy": 2.0, "di": 4.0}, 1e-5)
    with pytest.raises(ow.PlanError, match="with different budgets"):
        ow.Plan.load(tmp_path / "plan.json", owners=stricter)


def test_a_failed_save_leaves_no_half_written_file(plan, tmp_path, monkeypatch):
    """A failing write leaves the old files, and no temporary ones."""
    path = tmp_path / "plan.json"
    plan.save(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(arrays, file):
        with open(file, "wb") as half:
            half.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(plan_files, "save_file", fail)
    with pytest.raises(ow.OwnerwiseError, match=r"plan\.safetensors cannot be written: disk full"):
        plan.save(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_verify_uses_another_accountant_and_finds_overspending(plan):
    report = plan.verify()
    assert report.accountant.startswith("dp-accounting")
    assert report.points == 4
    assert 0.995 < report.lowest_ratio <= report.highest_ratio <= 1
    too_quiet = dataclasses.replace(plan, noise_std=plan.noise_std * 0.99)
    with pytest.raises(ow.PlanError) as error:
        too_quiet.verify()
    assert len(error.value.problems) == 5
    assert "4 owners would spend more than budgeted" in str(error.value)
    one_greedy = dataclasses.replace(plan, sampling_rates=plan.sampling_rates * [1, 1, 1, 1.02])
    with pytest.raises(ow.PlanError, match=r"expected batch size is 50, but(.|\n)*epsilon 4"):
        one_greedy.verify()


def test_verify_looks_at_every_owner():
    """Also at one that shares its budget with others, of which one is compared elsewhere."""
    owners = ow.Owners(np.repeat(np.arange(4), 10), {0: 1.0, 1: 1.0, 2: 1.0, 3: 4.0}, delta=1e-5)
    plan = ow.plan(owners, "sample", steps=100, batch_size=8)
    rates = plan.sampling_rates.copy()
    rates[1] = 1.0
    batch = float(rates @ plan.records)
    greedy = dataclasses.replace(plan, sampling_rates=rates, expected_batch_size=batch)
    with pytest.raises(ow.PlanError, match="1 owner would spend more"):
        greedy.verify()


def test_verify_spreads_over_many_budgets(monkeypatch):
    asked = []
    original = reference.epsilon
    monkeypatch.setattr(reference, "epsilon", lambda *a: asked.append((a[2], a[3])) or original(*a))
    rng = np.random.default_rng(0)
    epsilon = np.exp(rng.uniform(np.log(0.2), np.log(8), 500))
    delta = rng.choice([1e-5, 1e-6], 500)
    owners = ow.Owners(np.arange(500), epsilon, delta, records=np.full(500, 20))
    plan = ow.plan(owners, "scale", steps=100, batch_size=100)
    assert 6 <= len(asked) <= 8
    for value in (1e-5, 1e-6):
        of_delta = sorted(target for d, target in asked if d == pytest.approx(value))
        assert of_delta[0] == epsilon[delta == value].min()
        assert of_delta[-1] == epsilon[delta == value].max()
    ratio = plan.epsilon() / epsilon
    assert ((ratio > 0.995) & (ratio <= 1)).all()


def test_the_table_says_the_unit_loudly_and_hides_the_list(plan):
    text = plan.describe()
    assert "UNIT OF PRIVACY: ONE RECORD" in text
    assert "largest owner declares 400 records" in text
    assert "Assumed public" in text
    assert "ada" not in text
    assert "ada" not in repr(plan)
    assert "ada" in plan.describe(owners=True)


def test_rows_add_up_to_the_plan(plan):
    rows = plan.rows()
    assert len(rows) == 4
    assert sum(row.batch_share for row in rows) == pytest.approx(1)
    assert sum(row.records for row in rows) == 1000


def test_many_budgets_become_ranges():
    epsilon = np.geomspace(0.2, 8, 300)
    owners = ow.Owners(np.arange(300), epsilon, 1e-5, records=np.full(300, 20))
    rows = ow.plan(owners, "scale", steps=50, batch_size=100).rows()
    assert len(rows) == 8
    assert sum(row.owners for row in rows) == 300
    assert rows[0].epsilon[0] == 0.2
    assert rows[-1].epsilon[1] == 8
    assert len(ow.plan(owners, "scale", steps=50, batch_size=100).rows(owners=True)) == 300
