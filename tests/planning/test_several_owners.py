"""Plans for records with several owners, which obey the strictest of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ownerwise as ow
from ownerwise.owners import Shared
from ownerwise.planning import storage

METHODS = ("uniform", "sample", "scale", "both")
BUDGETS = {"ann": 0.5, "bob": 2.0, "cleo": 4.0, "dan": 8.0}
RECORDS = (
    ["ann"] * 4
    + ["bob"] * 20
    + ["dan"] * 30
    + [("ann", "dan")] * 3
    + [("cleo", "bob")] * 9
    + [("bob", "cleo", "dan")] * 5
)
SETTINGS = {"steps": 60, "batch_size": 6}
UNITS = {"record": {}, "owner": {"unit": "owner", "sampling": "record"}}


@pytest.fixture(scope="module")
def owners():
    return ow.Owners(RECORDS, BUDGETS)


_PLANS = {}


def plan_of(owners, method="both", unit="owner", **options) -> ow.Plan:
    key = (method, unit, *sorted(options.items()))
    if key not in _PLANS:
        _PLANS[key] = ow.plan(owners, method, **UNITS[unit], **{**SETTINGS, **options})
    return _PLANS[key]


def least(plan, array):
    """The smallest value among the owners of every record, by a loop."""
    names = plan.owners.ids.tolist()
    sets = [(row,) if isinstance(row, str) else row for row in RECORDS]
    return np.array([min(array[names.index(owner)] for owner in row) for row in sets])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", METHODS)
def test_a_record_obeys_the_strictest_of_its_owners(owners, method, unit):
    plan = plan_of(owners, method, unit)
    assert plan.records.tolist() == [7, 34, 14, 38]
    assert plan.total_records == len(RECORDS)
    index, of = owners.record_owner_index, plan.holders
    assert of.sampling_rates[index].tolist() == least(plan, plan.sampling_rates).tolist()
    assert of.clip_norms[index].tolist() == least(plan, plan.clip_norms).tolist()
    assert least(plan, plan.sampling_rates).sum() == pytest.approx(6, rel=1e-9)
    if method in ("scale", "both"):
        assert of.clip_norms[index].mean() == pytest.approx(1.0, rel=1e-3)
    assert (plan.epsilon() <= plan.targets).all()
    if method in ("sample", "both"):
        assert (plan.epsilon() > 0.98 * plan.targets).all()
    assert plan.verify().highest_ratio <= 1
    shares = [row.batch_share for row in plan.rows(owners=True)]
    assert sum(shares) == pytest.approx(1.0)


def test_the_plan_does_not_change_if_a_record_is_absent(owners):
    """Pitfalls 25 and 42: the divisor comes from declared numbers."""
    plan = plan_of(owners)
    declared = {"ann": 4, "bob": 20, "dan": 30, ("ann", "dan"): 3}
    declared |= {("bob", "cleo"): 9, ("bob", "cleo", "dan"): 5}
    without_ann = [row for row in RECORDS if "ann" not in row]
    for rows in (RECORDS[1:], RECORDS[:-1], without_ann):
        fewer = ow.Owners(rows, BUDGETS, records=declared)
        assert ow.plan(fewer, "both", **UNITS["owner"], **SETTINGS).hash == plan.hash
        attached = owners.with_records(rows)
        assert replace(plan, owners=attached).verified().hash == plan.hash


def test_noise_may_be_given(owners):
    for method in ("scale", "both"):
        plan = plan_of(owners, method)
        noise = 1.02 * plan.noise_std / plan.clip_norm
        by_noise = ow.plan(owners, method, steps=60, noise_multiplier=noise, **UNITS["owner"])
        assert by_noise.expected_batch_size >= 6 * 0.99


def test_owner_sampling_refuses_records_with_several_owners(owners):
    with pytest.raises(ow.PlanError, match=r"several owners \(such as ann \+ dan\): removing one"):
        ow.plan(owners, unit="owner", steps=10, batch_size=2)
    plain = ow.Owners(None, {"a": 1.0, "b": 2.0}, records={"a": 3, "b": 4})
    plan = ow.plan(plain, unit="owner", steps=10, batch_size=1)
    with pytest.raises(ow.PlanError, match="expected sampling 'record'"):
        replace(plan, shared=Shared([0, 1], [2], [1])).verify()


def test_plans_are_stored_with_their_sets(owners, tmp_path):
    plan = plan_of(owners)
    plan.save(tmp_path / "plan.json")
    loaded = ow.Plan.load(tmp_path / "plan.json", owners)
    assert loaded == plan
    assert loaded.shared == owners.shared
    assert ow.Plan.load(tmp_path / "plan.json").describe() == plan.describe()
    arrays = load_file(tmp_path / "plan.safetensors")
    assert set(storage.SHARED) < set(arrays)
    save_file(
        {**arrays, "shared_records": arrays["shared_records"] - 1}, tmp_path / "plan.safetensors"
    )
    with pytest.raises(ow.PlanError, match="content hash differs"):
        ow.Plan.load(tmp_path / "plan.json")
    del arrays["shared_sizes"]
    save_file(arrays, tmp_path / "plan.safetensors")
    with pytest.raises(ow.PlanError, match="does not contain the columns"):
        ow.Plan.load(tmp_path / "plan.json")


def test_plans_without_such_records_are_stored_as_before(tmp_path):
    owners = ow.Owners(None, {"a": 1.0, "b": 2.0}, records={"a": 3, "b": 4})
    plan = ow.plan(owners, steps=10, batch_size=1)
    plan.save(tmp_path / "plan.json")
    assert set(load_file(tmp_path / "plan.safetensors")) == set(storage.ARRAYS)
    assert "shared" not in json.loads((tmp_path / "plan.json").read_text())
    assert plan.holders.sampling_rates is plan.sampling_rates


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (None, "made for different owners"),
        (Shared([0, 3, 1, 2, 1, 2, 3], [2, 2, 3], [3, 9, 4]), "the expected batch size is"),
        (Shared([0, 9], [2], [3]), "not among the 4 owners"),
        (Shared([3, 0], [2], [3]), "ascending order"),
        (Shared([0, 3, 0, 3], [2, 2], [3, 1]), "every set once"),
        (Shared([0, 3], [2], [8]), "shares more records than they declare"),
        (Shared([0, 3], [1], [8]), "members, size and number"),
        (Shared([0, 3], [2], [-1]), "more records than they declare"),
    ],
)
def test_wrong_sets_in_a_plan_are_refused(owners, shared, message):
    with pytest.raises(ow.PlanError, match=message):
        replace(plan_of(owners), shared=shared, owners=owners if shared is None else None).verify()


def test_the_table_says_how_shared_records_count(owners):
    text = plan_of(owners).describe()
    assert "expected batch 6 of 71 records" in text
    assert "17 records with several owners: drawn at the smallest sampling rate" in text
    assert "and which owners share how many records." in text


def test_hardened_plans_count_a_shared_record_once(owners):
    plan = ow.plan(owners, hardened=True, **SETTINGS)
    assert plan.hardened_rows <= len(RECORDS)
    assert (plan.epsilon() <= plan.targets).all()
