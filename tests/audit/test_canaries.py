"""Canaries and their runs: the plan they get, and that they measure exactly what the step does."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import ownerwise as ow
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.neighbours import sensitivity
from ownerwise.audit.observation import Training, observe
from ownerwise.randomness import Noise

PEOPLE = 120


def owners(each=1, budgets=(1.0, 3.0), **options):
    names = np.arange(PEOPLE)
    epsilon = {int(name): budgets[name % len(budgets)] for name in names}
    return ow.Owners(np.repeat(names, each), epsilon, 1e-5, **options)


def planned(each=1, **options):
    return ow.plan(owners(each), **{"steps": 12, "batch_size": 30, **options})


PLANS = {
    "sample": {},
    "scale": {"method": "scale"},
    "hardened": {"hardened": True},
    "schedule": {"noise_schedule": {"name": "exponential", "rate": 0.05}},
    "owner": {"each": 3, "unit": "owner"},
    "owner, few rows": {"each": 4, "unit": "owner", "records_per_owner": 2},
    "owner, records": {"each": 3, "unit": "owner", "sampling": "record"},
    "closing": {"calibration": ow.Calibration(), "method": "scale"},
}


def stream(seed=0):
    return ow.SecretStream.from_seed(seed)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_canaries_have_the_values_of_real_owners_in_a_plan_that_verifies(name, alone):
    plan = planned(**PLANS[name])
    canaries = Canaries.of(plan, 40, stream(), alone=alone)
    extended = canaries.plan
    extended.verify()
    kept = 0 if alone else len(plan.targets)
    assert len(extended.targets) == kept + 40
    assert extended.noise_std == plan.noise_std
    for number, epsilon in enumerate((1.0, 3.0)):
        own = canaries.owner[canaries.members(number)]
        template = np.flatnonzero(plan.targets == epsilon)[0]
        for values in ("targets", "deltas", "sampling_rates", "clip_norms"):
            assert np.all(getattr(extended, values)[own] == getattr(plan, values)[template])
        assert extended.epsilon()[own[0]] == pytest.approx(plan.epsilon()[template], rel=1e-6)
    if not alone:
        assert np.array_equal(extended.sampling_rates[:kept], plan.sampling_rates)


def test_coins_are_fair_and_secret_and_do_not_change_the_plan():
    canaries = Canaries.of(planned(), 1000, ow.SecretStream(), alone=True)
    again = canaries.flipped(ow.SecretStream())
    assert 400 < canaries.included.sum() < 600  # p < 1e-9
    assert 400 < (canaries.included != again.included).sum() < 600
    assert canaries.plan.hash == again.plan.hash
    assert canaries.plan.owners.records_basis == "declared"


def test_at_most_four_budgets_have_canaries():
    plan = ow.plan(owners(budgets=tuple(range(1, 11))), steps=5, batch_size=30)
    groups = Canaries.of(plan, 40, stream(), alone=True).groups
    assert groups == ["ε = 1", "ε = 4", "ε = 7", "ε = 10"]


def test_column_statistics_are_left_out_of_an_audit_of_canaries_alone():
    plan = planned(statistics=ow.ColumnStatistics(share=0.05))
    assert Canaries.of(plan, 40, stream(), alone=True).plan.opening_std is None
    with pytest.raises(ow.OwnerwiseError, match="accounts for column statistics"):
        Canaries.of(plan, 40, stream(), alone=False)


def test_too_few_canaries_are_refused():
    with pytest.raises(ow.OwnerwiseError, match="3 canaries for 2 groups: expected at least 2"):
        Canaries.of(planned(), 3, stream(), alone=True)


@pytest.fixture
def silent(monkeypatch):
    """Remove the noise from the step."""
    monkeypatch.setattr(
        Noise, "gaussian",
        lambda self, step, sums, std, grid, factor=1.0, like=None, overwrite=False: [
            (total * factor).to(part) for total, part in zip(sums, like, strict=True)
        ],
    )  # fmt: skip


@pytest.mark.parametrize("weights", [None, ow.INO()], ids=["plain", "INO"])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "closing"])
def test_without_noise_the_sums_are_exactly_what_the_plan_says(name, weights, silent):
    ordered = weights is not None
    canaries = Canaries.of(planned(**PLANS[name]), 40, stream(1), alone=True, ordered=ordered)
    seen = observe(canaries, Training(weights=weights), stream(1))
    assert seen.drawn[:, ~canaries.included].sum() == 0
    assert seen.drawn.sum() > 20
    np.testing.assert_allclose(seen.sums, seen.expected, atol=2e-4 * canaries.clip_norm.max())
    if weights is None:
        full = seen.drawn * canaries.clip_norm
        np.testing.assert_allclose(seen.expected, full, rtol=2e-3)


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_canaries_retire_when_their_budget_is_used_up(unit, silent):
    """With individual accounting, they are always clipped; the scores leave out what follows."""
    each = 1 if unit == "record" else 3
    settings = {"method": "individual", "unit": unit, "steps": 6, "clipped_steps": 4}
    plan = ow.plan(owners(each), **settings)
    canaries = Canaries.of(plan, 40, stream(1), alone=True)
    canaries.plan.verify()
    assert np.array_equal(canaries.paid[:, 0], [1, 1, 1, 1, 0, 0])
    seen = observe(canaries, Training(), stream(1))
    np.testing.assert_allclose(seen.sums, seen.expected, atol=2e-4 * canaries.clip_norm.max())
    whole = 4 * canaries.clip_norm * canaries.included
    np.testing.assert_allclose(seen.scores, whole, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, None])
def test_canaries_train_beside_a_model_that_stays_untouched(optimizer, silent):
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    data = torch.randn(PEOPLE, 4), torch.randint(0, 3, (PEOPLE,))
    training = Training(model, data, cross_entropy, optimizer)
    canaries = Canaries.of(planned(), 40, stream(2), alone=False)
    seen = observe(canaries, training, stream(2))
    np.testing.assert_allclose(seen.sums, seen.expected, atol=1e-3)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_change_due_to_one_canary_is_its_clip_norm():
    canaries = Canaries.of(planned(method="scale"), 40, stream(), alone=True)
    found = sensitivity(canaries, Training(), seed=3)
    assert [check.group for check in found] == canaries.groups
    assert all(0.99 < check.observed <= 1.0 + 1e-6 and check.p == 1.0 for check in found)


def test_a_model_needs_data_and_a_release_needs_a_model():
    with pytest.raises(ow.OwnerwiseError, match="expected a model with its data and loss"):
        Training(torch.nn.Linear(2, 2))
    part = ow.Partition({"a": ("x", "y")}, classes=2)
    fair = ow.RateConstraints(ow.constraints.demographic_parity(part, "a", max_gap=0.1))
    with pytest.raises(ow.OwnerwiseError, match="outputs of a model"):
        Training(release=fair)
