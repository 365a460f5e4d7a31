"""Plan files: what earlier versions wrote is still read, and unknown formats are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.planning.storage import FORMAT

STORED = Path(__file__).parents[1] / "files" / "plans-0.1.0"
EXPECTED = json.loads((STORED / "expected.json").read_text())
NAMES = ("ada", "ben", "cy", "dee")


def owners() -> ow.Owners:
    epsilon = dict(zip(NAMES, (0.5, 1.0, 2.0, 4.0), strict=True))
    delta = dict.fromkeys(NAMES, 1e-5) | {"ada": 1e-6}
    return ow.Owners(
        None, epsilon, delta, records=dict(zip(NAMES, (100, 200, 300, 400), strict=True))
    )


def test_a_stored_plan_of_every_kind_is_kept():
    assert {path.stem for path in STORED.glob("*.safetensors")} == set(EXPECTED)
    plans = [ow.Plan.load(STORED / f"{name}.json") for name in EXPECTED]
    assert {plan.method for plan in plans} == {"uniform", "sample", "scale", "both"}
    assert {plan.accountant for plan in plans} == {"pld", "rdp"}
    assert {plan.release_noise for plan in plans} == {"gaussian", "laplace"}
    assert any(plan.release_shares is not None for plan in plans)
    assert any(len(plan.schedule.segments) > 1 for plan in plans)


@pytest.mark.parametrize("name", EXPECTED)
def test_plans_of_version_0_1_0_load_with_the_same_hash_and_epsilon(name):
    plan = ow.Plan.load(STORED / f"{name}.json", owners=owners())
    assert plan.hash == EXPECTED[name]["hash"]
    np.testing.assert_allclose(plan.epsilon(), EXPECTED[name]["epsilon"], rtol=1e-9)


@pytest.mark.parametrize("name", ["sample", "schedule", "laplace-release"])
def test_saving_a_stored_plan_again_writes_the_same_bytes(name, tmp_path):
    ow.Plan.load(STORED / f"{name}.json").save(tmp_path / f"{name}.json")
    for ending in ("json", "safetensors"):
        file = f"{name}.{ending}"
        assert (tmp_path / file).read_bytes() == (STORED / file).read_bytes()


@pytest.mark.parametrize(
    ("version", "advice"), [(FORMAT + 1, "upgrade ownerwise"), (0, "make the plan again")]
)
def test_an_unknown_format_is_refused_in_one_sentence(version, advice, tmp_path):
    for ending in ("json", "safetensors"):
        shutil.copy(STORED / f"sample.{ending}", tmp_path)
    path = tmp_path / "sample.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(ow.PlanError) as caught:
        ow.Plan.load(path)
    assert caught.value.problems == [
        f"{path} has plan format {version}, but this version of ownerwise reads format {FORMAT}: "
        f"{advice}"
    ]
