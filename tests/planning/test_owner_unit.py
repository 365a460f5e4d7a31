"""Plans whose unit of privacy is the owner: all of their records together."""

import json

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import binom

import ownerwise as ow
from ownerwise import accounting

METHODS = ("uniform", "sample", "scale", "both")
RECORDS = {"ann": 1, "ben": 3, "eve": 12, "firm": 40}
BUDGETS = {"ann": 0.5, "ben": 2.0, "eve": 1.0, "firm": 4.0}


@pytest.fixture(scope="module")
def owners():
    return ow.Owners(None, BUDGETS, records=RECORDS)


@pytest.fixture(scope="module")
def many():
    return ow.Owners(np.arange(200).repeat(4), np.geomspace(0.5, 8, 200))


def independent(plan, owner, count):
    """Epsilon of an owner by dp-accounting; `count` elements are drawn with the owner's rate."""
    rate, multiplier = float(plan.sampling_rates[owner]), float(plan.noise_multipliers[owner])
    if count == 1:
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        step = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    else:
        drawn = np.arange(count + 1)
        step = MixtureOfGaussiansDpEvent(
            multiplier, drawn.tolist(), binom.pmf(drawn, count, rate).tolist()
        )
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, plan.steps))
    return accountant.get_epsilon(float(plan.deltas[owner]))


@pytest.mark.parametrize("method", METHODS)
def test_owner_sampling_keeps_every_owner_within_the_budget(many, method):
    plan = ow.plan(many, method, unit="owner", steps=100, batch_size=20)
    assert (plan.sampling, plan.records_per_owner) == ("owner", 8)
    assert (plan.elements == 1).all()
    assert plan.sampling_rates.sum() == pytest.approx(20)
    assert (plan.epsilon() <= plan.targets).all()
    assert np.array_equal(plan.owner_epsilon(), plan.epsilon())
    if method == "scale":
        assert plan.clip_norms.mean() == pytest.approx(1.0)
    for owner in (0, 99, 199):
        spent = independent(plan, owner, 1)
        assert spent <= plan.targets[owner] * (1 + 2e-3)  # its grid adds up to 2e-3
        assert spent > 0.99 * plan.targets[owner] or method == "uniform"


@pytest.mark.parametrize("method", METHODS)
def test_owner_sampling_is_the_plan_of_owners_with_one_record(many, method):
    ones = ow.Owners(np.arange(200), many.epsilon)
    plan = ow.plan(many, method, unit="owner", steps=100, batch_size=20)
    of_records = ow.plan(ones, method, steps=100, batch_size=20)
    for name in ("sampling_rates", "clip_norms"):
        assert np.array_equal(getattr(plan, name), getattr(of_records, name))
    assert plan.noise_std == of_records.noise_std


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("method", METHODS)
def test_all_records_of_an_owner_stay_within_the_budget(owners, method, accountant):
    request = {"unit": "owner", "sampling": "record", "accountant": accountant}
    plan = ow.plan(owners, method, steps=100, batch_size=5, **request)
    assert np.array_equal(plan.elements, plan.records)
    assert (plan.epsilon() <= plan.targets).all()
    if method != "uniform":
        assert (plan.epsilon() > 0.99 * plan.targets).all()
    for owner in range(4):
        spent = independent(plan, owner, int(plan.records[owner]))
        assert spent <= plan.targets[owner] * (1 + 2e-3)
        assert spent > 0.99 * plan.targets[owner] or (method, accountant) != ("sample", "pld")


@pytest.mark.parametrize("method", METHODS)
def test_owners_with_one_record_get_the_plan_of_records_bit_for_bit(method):
    ones = ow.Owners(np.arange(100), np.geomspace(0.5, 8, 100))
    of_records = ow.plan(ones, method, steps=100, batch_size=10)
    plan = ow.plan(ones, method, steps=100, batch_size=10, unit="owner", sampling="record")
    for name in ("sampling_rates", "clip_norms"):
        assert np.array_equal(getattr(plan, name), getattr(of_records, name))
    assert plan.noise_std == of_records.noise_std
    assert np.array_equal(plan.epsilon(), of_records.epsilon())
    assert plan != of_records


@pytest.mark.parametrize("method", ["sample", "both"])
def test_many_numbers_of_records_end_on_the_safe_side(method):
    generator = np.random.default_rng(1)
    records = generator.integers(1, 60, 400)
    owners = ow.Owners(None, np.exp(generator.uniform(-0.5, 1.5, 400)), records=records)
    request = {"unit": "owner", "sampling": "record", "steps": 100}
    plan = ow.plan(owners, method, batch_size=100, **request)
    assert (plan.epsilon() <= plan.targets).all()
    assert (plan.epsilon() > 0.99 * plan.targets).all()
    assert plan.sampling_rates @ plan.records == pytest.approx(100)
    run = plan.run_cost
    for owner in generator.integers(0, 400, 12):  # one by one, with their own number of records
        exposure = accounting.Exposure(*(float(part[owner]) for part in plan.exposures))
        spent = run.epsilon(exposure, plan.deltas[owner], int(plan.records[owner]))
        assert spent <= plan.targets[owner]


@pytest.mark.parametrize(
    ("noise", "figures"), [(1, (1.83, 3.98, 8.90, 27.9)), (2, (0.622, 1.333, 2.893, 8.445))]
)
def test_figures_of_several_records(noise, figures):
    counts = np.array([1, 2, 4, 10])
    found = accounting.epsilon(0.01, noise, 1000, np.full(4, 1e-5), records=counts)
    assert found == pytest.approx(figures, rel=4e-3)


def test_numbers_of_records_are_rounded_up():
    records = np.arange(0, 1000)
    levels = accounting.record_levels(records)
    assert (levels >= np.maximum(records, 1)).all()
    assert len(np.unique(levels)) <= 20
    assert levels.max() == 999
    assert accounting.record_levels(np.array([0, 3, 7])).tolist() == [1, 3, 7]


def test_noise_given_finds_batch_or_steps(owners):
    request = {"unit": "owner", "sampling": "record", "noise_multiplier": 30.0}
    for method in METHODS:
        by_steps = ow.plan(owners, method, steps=100, **request)
        by_batch = ow.plan(owners, method, batch_size=by_steps.expected_batch_size, **request)
        assert by_batch.steps == pytest.approx(100, abs=3)


def test_an_owner_without_records_is_the_neighbouring_data_set():
    owners = ow.Owners(None, {"a": 1.0, "b": 2.0}, records={"a": 0, "b": 3})
    for sampling in ("owner", "record"):
        plan = ow.plan(owners, unit="owner", sampling=sampling, steps=20, batch_size=1)
        assert (plan.epsilon() <= plan.targets).all()
    with pytest.raises(ow.PlanError, match=r"records of owner a \(0\): .* at least 1"):
        ow.plan(owners, steps=20, batch_size=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "ower"}, "did you mean 'owner'"),
        ({"sampling": "owner"}, "because whole owners are drawn and protected"),
        ({"unit": "owner", "sampling": "rows"}, "sampling is 'rows'"),
        ({"records_per_owner": 4}, "the only one that limits"),
        ({"unit": "owner", "records_per_owner": 0}, "a whole number of at least 1, or None"),
        ({"unit": "owner", "batch_size": 5}, "at most the 4 owners"),
        ({"unit": "owner", "hardened": True}, "a public number of rows"),
        (
            {"unit": "owner", "sampling": "record", "hardened": True},
            "records of an owner together; leave it out$",
        ),
        (
            {"unit": "owner", "sampling": "record", "calibration": ow.Calibration()},
            "use sampling='owner'",
        ),
        (
            {"unit": "owner", "sampling": "record", "release_noise": "laplace", "release_std": 9.0},
            "use sampling='owner'",
        ),
    ],
)
def test_bad_requests_say_what_would_work(owners, arguments, message):
    with pytest.raises(ow.PlanError, match=message):
        ow.plan(owners, **{"steps": 10, "batch_size": 2, **arguments})


def test_all_records_of_a_drawn_owner_may_take_part(owners):
    plan = ow.plan(owners, unit="owner", records_per_owner=None, steps=10, batch_size=2)
    assert plan.records_per_owner is None
    assert "with all records each" in plan.describe()


@pytest.mark.parametrize("sampling", ["owner", "record"])
def test_plans_of_owners_are_stored_and_loaded(owners, sampling, tmp_path):
    plan = ow.plan(owners, unit="owner", sampling=sampling, steps=20, batch_size=2)
    plan.save(tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    loaded = ow.Plan.load(tmp_path / "plan.json", owners)
    assert loaded == plan
    assert (loaded.unit, loaded.sampling) == ("owner", sampling)
    assert loaded.records_per_owner == plan.records_per_owner
    stored["unit"] = "record"
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(ow.PlanError, match="content hash differs"):
        ow.Plan.load(tmp_path / "plan.json", owners)


def test_a_changed_unit_is_noticed(owners):
    from dataclasses import replace

    record_plan = ow.plan(owners, steps=20, batch_size=5)
    with pytest.raises(ow.PlanError, match="would spend more than budgeted"):
        replace(record_plan, unit="owner").verify()
    with pytest.raises(ow.PlanError, match="expected 'record' for both"):
        replace(record_plan, sampling="owner").verify()
    owner_plan = ow.plan(owners, unit="owner", steps=20, batch_size=2)
    with pytest.raises(ow.PlanError, match="expected batch size"):
        replace(owner_plan, sampling="record", records_per_owner=None).verify()


def test_every_epsilon_names_the_unit(owners):
    text = ow.plan(owners, unit="owner", steps=20, batch_size=2).describe()
    assert "expected batch 2 of 4 owners with at most 8 records each" in text
    assert "UNIT OF PRIVACY: ONE OWNER, with all of their records." in text
    assert "ONE RECORD" not in text
    of_records = ow.plan(owners, unit="owner", sampling="record", steps=20, batch_size=2)
    assert "at most as many records as declared" in of_records.describe()


def test_hashes_of_plans_of_records_do_not_change():
    ids = np.repeat(["ada", "ben", "cy", "di"], [400, 300, 200, 100])
    owners = ow.Owners(ids, {"ada": 0.5, "ben": 1.0, "cy": 2.0, "di": 4.0}, 1e-5)
    plan = ow.plan(owners, steps=200, batch_size=50, clip_norm=0.8)
    keys = {"unit", "sampling", "records_per_owner"}
    assert not keys & set(plan.header())
    assert plan.header()["format"] == 1
